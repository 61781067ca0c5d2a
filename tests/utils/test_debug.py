import math

import pytest
import torch

from verl.protocol import DataProto
from verl.utils.debug import GPUMemoryLogger, log_gpu_memory_usage, marked_timer, simple_timer
from verl.utils.debug.metrics import calculate_debug_metrics


def data(rollout, actor, mask) -> DataProto:
    return DataProto.from_dict(
        tensors={
            "rollout_log_probs": torch.tensor(rollout).log(),
            "old_log_probs": torch.tensor(actor).log(),
            "response_mask": torch.tensor(mask),
        }
    )


def test_probabilities_are_compared_on_trained_tokens_only():
    metrics = calculate_debug_metrics(data([[0.5, 0.2, 0.9]], [[0.25, 0.2, 0.1]], mask=[[1, 1, 0]]))
    assert metrics["training/rollout_probs_diff_valid"] == 1
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.25)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.125)
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(0.125)
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)


def test_probabilities_that_move_against_each_other_correlate_negatively():
    metrics = calculate_debug_metrics(data([[0.1, 0.2, 0.3]], [[0.3, 0.2, 0.1]], [[1, 1, 1]]))
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(-1.0)


def test_an_undefined_correlation_is_left_out_and_an_empty_batch_says_so():
    constant = calculate_debug_metrics(data([[0.5, 0.5]], [[0.25, 0.5]], [[1, 1]]))
    assert "training/rollout_actor_probs_pearson_corr" not in constant
    assert all(math.isfinite(value) for value in constant.values())
    empty = calculate_debug_metrics(data([[0.5]], [[0.5]], [[0]]))
    assert empty == {"training/rollout_probs_diff_valid": 0}


def test_the_old_path_offers_the_timers_and_memory_logs():
    timing = {}
    with marked_timer("a", timing), simple_timer("b", timing):
        log_gpu_memory_usage("here")
    assert set(timing) == {"a", "b"}
    assert GPUMemoryLogger(role="actor")(len)([1, 2]) == 2
