"""Whole runs on Megatron have the curve that the same runs have on FSDP."""

import pytest
from transformers import AutoModelForCausalLM

from tests.tiny_models import plain_twin, tiny_model
from tests.toy import ACTOR, ROLLOUT, make_toy, toy_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

TWO_RANKS = [
    "trainer.n_gpus_per_node=2",
    "trainer.controller=local",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
]
TENSOR = [f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=2"]
NAMES = ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy")


def curves(steps, names=NAMES):
    return {name: [step[name] for step in steps if name in step] for name in names}


def assert_same_curves(found, expected, rel=1e-4):
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=rel, abs=1e-6), name


def test_a_task_is_learned_on_two_tensor_ranks(tmp_path):
    toy = make_toy(tmp_path / "toy")
    changes = [
        *TWO_RANKS,
        f"{ROLLOUT}.n=8",
        "data.train_batch_size=8",
        f"{ACTOR}.ppo_mini_batch_size=8",
        "trainer.total_training_steps=12",
    ]
    expected = curves(toy_run(toy, tmp_path / "fsdp", *changes)[0])
    found = curves(toy_run(toy, tmp_path / "megatron", *changes, *TENSOR)[0])
    assert_same_curves(found, expected)
    scores = found["critic/score/mean"]
    assert scores[0] < 0.1
    assert scores[-1] > 0.8


@pytest.mark.parametrize(
    ("model_type", "coefficient"),
    [
        ("qwen3_moe", ["actor_rollout_ref.model.override_config.router_aux_loss_coef=0.1"]),
        ("deepseek_v3", []),
    ],  # balanced by its correction bias
)
def test_experts_are_trained_and_counted_as_on_fsdp(model_type, coefficient, tmp_path):
    """Weights go to the rollout after each step, so a wrong one would change the next."""
    toy = make_toy(tmp_path / "toy")
    vocabulary = AutoModelForCausalLM.from_pretrained(toy / "model").config.vocab_size
    sparse = plain_twin(tiny_model(model_type, scale=0.05, vocab_size=vocabulary))
    sparse.save_pretrained(toy / "model")
    changes = [
        *TWO_RANKS,
        "trainer.total_training_steps=3",
        *coefficient,
    ]
    layout = [
        *TENSOR,
        f"{ACTOR}.megatron.expert_model_parallel_size=2",
        f"{ACTOR}.megatron.expert_tensor_parallel_size=1",
    ]
    names = (*NAMES, "actor/router_aux_loss", "actor/expert_load_max", "actor/idle_experts")
    expected = curves(toy_run(toy, tmp_path / "fsdp", *changes)[0], names)
    found = curves(toy_run(toy, tmp_path / "megatron", *changes, *layout)[0], names)
    assert len(found["actor/router_aux_loss"]) == 3 * len(coefficient)
    assert len(found["actor/expert_load_max"]) == 3
    assert_same_curves(found, expected, rel=1e-3)
