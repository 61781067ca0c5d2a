"""Runs of models with experts and with fp8 rollout, through the command's own path."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import plain_twin, tiny_model
from tests.toy import ACTOR, ROLLOUT, make_toy, toy_run, weights

REPLAY = f"{ACTOR}.router_replay.mode"


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The toy task with a Qwen3-MoE of four experts."""
    folder = make_toy(tmp_path_factory.mktemp("toy"))
    dense = AutoModelForCausalLM.from_pretrained(folder / "model")
    sparse = plain_twin(tiny_model("qwen3_moe", scale=0.05, vocab_size=dense.config.vocab_size))
    sparse.save_pretrained(folder / "model")
    return folder


def test_in_exact_mode_rollout_routes_are_replayed_without_a_difference(toy, tmp_path):
    """R3 is an assertion there: log-probs of rollout and training are equal to the bit."""
    steps, trainer = toy_run(
        toy,
        tmp_path,
        f"{ROLLOUT}.exact=True",
        f"{REPLAY}=R3",
        f"{ROLLOUT}.enable_rollout_routing_replay=True",
    )
    assert trainer.batch.batch["routed_experts"].shape[2:] == (2, 2)
    for step in steps:
        assert step["actor/old_log_prob_error"] == 0
        assert step["actor/router_mismatch"] == 0
        assert step["actor/expert_load_max/layer_1"] >= 1


def test_the_old_policys_routes_are_replayed_in_later_mini_batches(toy, tmp_path):
    steps, _ = toy_run(
        toy,
        tmp_path,
        f"{REPLAY}=R2",
        f"{ACTOR}.ppo_mini_batch_size=2",
        "actor_rollout_ref.model.override_config.router_aux_loss_coef=0.1",
    )
    assert all(0 <= step["actor/router_mismatch"] < 1 for step in steps)
    assert all(1 < step["actor/router_aux_loss"] < 8 for step in steps)


def test_adapters_on_experts_train_exactly_and_continue_bit_for_bit(toy, tmp_path):
    changes = [
        f"{ROLLOUT}.exact=True",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.target_modules=[all-linear,experts]",
        "trainer.save_freq=1",
    ]
    straight, whole = toy_run(toy, tmp_path / "a", *changes)
    assert all(step["actor/old_log_prob_error"] == 0 for step in straight)
    toy_run(toy, tmp_path / "b", *changes, "trainer.total_training_steps=1")
    (rest,), resumed = toy_run(toy, tmp_path / "b", *changes)
    assert rest["critic/score/mean"] == straight[1]["critic/score/mean"]
    found, expected = weights(resumed), weights(whole)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert any(".experts" in name and ".lora_B" in name and w.any() for name, w in found.items())


def test_a_task_is_learned_from_an_fp8_rollout_with_correction(tmp_path):
    toy = make_toy(tmp_path / "toy")
    steps, _ = toy_run(
        toy,
        tmp_path,
        f"{ROLLOUT}.dtype=fp8",
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.total_training_steps=12",
    )
    rewards = [step["critic/score/mean"] for step in steps]
    assert max(rewards[-3:]) > rewards[0] + 0.2
    assert 0 < steps[0]["training/rollout_probs_diff_mean"] < 0.05
