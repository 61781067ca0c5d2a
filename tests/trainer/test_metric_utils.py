import math

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    compute_variance_proxy_metrics,
)


def batch(**overrides) -> DataProto:
    """Three responses of 2, 3 and 0 tokens (width 3) to prompts of 2, 1 and 2 (width 2)."""
    tensors = {
        "responses": torch.zeros(3, 3, dtype=torch.long),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1], [1, 1, 0, 0, 0]]),
        "response_mask": torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]]),  # a tool reply in row 1
        "token_level_scores": torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]]),
        "token_level_rewards": torch.tensor([[-0.5, 1.0, 0.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]]),
        "advantages": torch.tensor([[1.0, 2.0, 9.0], [-3.0, 9.0, 4.0], [9.0, 9.0, 9.0]]),
        "returns": torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 6.0], [9.0, 9.0, 9.0]]),
        "values": torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 6.0], [9.0, 9.0, 9.0]]),
    } | overrides
    turns = np.array([2, 4, 2], dtype=object)
    return DataProto.from_dict(tensors=tensors, non_tensors={"__num_turns__": turns})


def test_scores_are_per_response_and_leave_aborted_responses_out():
    metrics = compute_data_metrics(batch())
    assert metrics["critic/score/mean"] == 2.0  # (1 + 3) / 2
    assert metrics["critic/score/max"] == 3.0
    assert metrics["critic/score/min"] == 1.0
    assert metrics["critic/rewards/mean"] == 1.75
    assert metrics["response/aborted_ratio"] == pytest.approx(1 / 3)


def test_advantages_and_returns_are_per_trained_token():
    metrics = compute_data_metrics(batch())
    assert metrics["critic/advantages/mean"] == 1.0  # (1 + 2 - 3 + 4) / 4
    assert metrics["critic/advantages/max"] == 4.0
    assert metrics["critic/advantages/min"] == -3.0
    assert metrics["critic/returns/mean"] == 3.0  # (1 + 2 + 3 + 6) / 4


def test_lengths_come_with_and_without_aborted_responses():
    metrics = compute_data_metrics(batch())
    assert metrics["response_length/mean"] == pytest.approx(5 / 3)
    assert metrics["response_length/min"] == 0
    assert metrics["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert metrics["response_length_non_aborted/mean"] == 2.5
    assert metrics["response_length_non_aborted/min"] == 2
    assert metrics["response_length_non_aborted/clip_ratio"] == 0.5
    assert metrics["prompt_length/mean"] == pytest.approx(5 / 3)
    assert metrics["prompt_length/clip_ratio"] == pytest.approx(2 / 3)
    assert metrics["num_turns/mean"] == pytest.approx(8 / 3)


def test_the_names_are_the_documented_ones():
    def spread(name, *more):
        return {f"{name}/{s}" for s in ("mean", "max", "min", *more)}

    expected = {"critic/vf_explained_var", "response/aborted_ratio"}
    for name in ("score", "rewards", "advantages", "returns", "values"):
        expected |= spread(f"critic/{name}")
    for name in ("response_length", "response_length_non_aborted", "prompt_length"):
        expected |= spread(name, "clip_ratio")
    expected |= spread("num_turns") | spread("training/num_turns")
    assert set(compute_data_metrics(batch())) == expected
    without_critic = compute_data_metrics(batch(), use_critic=False)
    assert set(without_critic) == expected - spread("critic/values") - {"critic/vf_explained_var"}


def test_a_perfect_critic_explains_all_variance_and_a_constant_one_none():
    assert compute_data_metrics(batch())["critic/vf_explained_var"] == 1.0
    constant = compute_data_metrics(batch(values=torch.full((3, 3), 3.0)))
    assert constant["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize(
    "empty",
    [
        {"response_mask": torch.zeros(3, 3, dtype=torch.long)},
        {"attention_mask": torch.tensor([[1, 1, 0, 0, 0]] * 3)},
    ],
)
def test_a_batch_without_a_trained_token_or_an_answer_has_finite_metrics(empty):
    metrics = compute_data_metrics(batch(**empty))
    assert all(math.isfinite(value) for value in metrics.values())


def test_time_is_given_per_stage_and_per_token():
    metrics = compute_timing_metrics(batch(), {"gen": 1.0, "ref": 2.0, "agent_loop/x": 3.0})
    assert metrics == {
        "timing_s/gen": 1.0,
        "timing_s/ref": 2.0,
        "timing_s/agent_loop/x": 3.0,
        "timing_per_token_ms/gen": 200.0,  # five response tokens
        "timing_per_token_ms/ref": 200.0,  # ten tokens
    }


def test_throughput_is_tokens_per_second_and_gpu():
    data = batch()
    data.meta_info["global_token_num"] = [400, 600]
    assert compute_throughout_metrics(data, {"step": 5.0}, n_gpus=4) == {
        "perf/total_num_tokens": 1000,
        "perf/time_per_step": 5.0,
        "perf/throughput": 50.0,
    }


def test_variance_proxies_follow_their_formula():
    half = math.log(0.5)
    data = batch(
        response_mask=torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]),
        advantages=torch.tensor([[2.0, 2.0, 7.0], [-1.0, 7.0, 7.0], [7.0, 7.0, 7.0]]),
        old_log_probs=torch.full((3, 3), half),
        sum_pi_squared=torch.full((3, 3), 0.5),
    )
    # w_t = 1 - 2 * 0.5 + 0.5 = 0.5, so W = 1.0 and 0.5; A^2 = 4 and 1.
    loud = compute_variance_proxy_metrics(data, gradient_norm=2.0)  # more signal than power
    assert loud["variance_proxy/proxy3_pure_noise"] == 0.0
    quiet = compute_variance_proxy_metrics(data, gradient_norm=1.0)
    assert quiet["variance_proxy/proxy3_pure_noise"] == 1.25  # (2.25 - 1) / (2 - 1)
    metrics = compute_variance_proxy_metrics(data, gradient_norm=1.5)
    assert metrics == pytest.approx(
        {
            "variance_proxy/expected_w": 0.75,
            "variance_proxy/expected_a_squared": 2.5,
            "variance_proxy/proxy2_total_power": 2.25,  # (4 * 1.0 + 1 * 0.5) / 2
            "variance_proxy/proxy1_signal_strength": 2.25,
            "variance_proxy/proxy3_pure_noise": 0.0,
        }
    )
    weighted = batch(
        response_mask=data.batch["response_mask"],
        advantages=data.batch["advantages"],
        old_log_probs=data.batch["old_log_probs"],
        sum_pi_squared=data.batch["sum_pi_squared"],
        rollout_is_weights=torch.full((3, 3), 2.0),
    )
    assert compute_variance_proxy_metrics(weighted)["variance_proxy/expected_w"] == 3.0


def test_variance_proxies_need_their_columns():
    assert compute_variance_proxy_metrics(batch()) == {}
