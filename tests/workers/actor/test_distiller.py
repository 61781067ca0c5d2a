"""The distillation part of an update: its gradient does not depend on how rows are cut."""

from functools import partial

import pytest
import torch

from tests.parity.rows import batch
from tests.parity.updates import KeepsGradients
from tests.tiny_models import tiny_model
from verl.algos.distillation import FULL, TOP_K
from verl.config.actor import FSDPActorConfig
from verl.config.distillation import DistillationLossConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.workers.actor.distiller import Distiller
from verl.workers.actor.dp_actor import Policy
from verl.workers.actor.teacher import (
    PROMPT_MASK,
    PROMPTS,
    TEACHER_LOG_PROBS,
    Teacher,
    num_top_tokens,
    teacher_columns,
)
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.outputs import TEACHER_INDEX

MODES = ("k3", *TOP_K, *FULL)
TEMPERATURE = 0.8
KEEPS = FSDPOptimizerConfig(
    lr=0.1, optimizer=KeepsGradients.__name__, optimizer_impl=KeepsGradients.__module__
)


def student(**options):
    engine = OneDeviceEngine(partial(tiny_model, "llama"), KEEPS, max_grad_norm=1e9, **options)
    engine.initialize()
    return engine


def frozen(scale=0.1, architecture="qwen2", **options):
    engine = OneDeviceEngine(partial(tiny_model, architecture, scale=scale), None, **options)
    engine.initialize()
    return Teacher(engine)


def rows(name="many prompts"):
    return batch(name).exclude("ce_weights", "positive_weights", "kl_weights")


def updated(engine, teachers, mode, data, *, micro=64, **options):
    """Metrics and gradient of one optimizer step."""
    loss = DistillationLossConfig(loss_mode=mode, topk=5, use_task_rewards=False, **options)
    actor = FSDPActorConfig(ppo_micro_batch_size_per_gpu=micro)
    if mode not in FULL:
        answers = teacher_columns(
            teachers,
            data,
            micro_batching=[[row] for row in range(len(data))],
            temperature=TEMPERATURE,
            top_k=num_top_tokens(loss),
        )
        data = data.copy().update(answers)
    policy = Policy(actor, engine, Distiller(loss, actor, teachers))
    metrics = policy.update_policy(data, rows_per_step=len(data), temperature=TEMPERATURE)
    kept = engine.state_dict()["optimizer"]["optimizer"]["state"].values()
    return metrics, [state["gradient"].clone() for state in kept]


def same(found, expected):
    for metric, value in expected[0].items():
        if metric.startswith("distillation/"):
            assert found[0][metric] == pytest.approx(value, rel=1e-4, abs=1e-6), metric
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_and_shared_prompts_do_not_change_the_gradient(mode):
    data = rows()
    expected = updated(student(), [frozen()], mode, data)
    assert expected[0]["distillation/divergence"] > 0.01
    assert max(gradient.abs().max() for gradient in expected[1]) > 1e-3
    shared = {"prefix_sharing": True}
    same(updated(student(**shared), [frozen(**shared)], mode, data, micro=2), expected)
    same(updated(student(**shared), [frozen()], mode, data, micro=1), expected)


@pytest.mark.parametrize("mode", ["k3", "reverse_kl_topk", *FULL])
def test_a_teacher_that_is_the_student_leaves_no_gradient(mode):
    engine = student()
    metrics, gradients = updated(engine, [Teacher(engine)], mode, rows())
    assert abs(metrics["distillation/loss"]) < 1e-7
    assert max(gradient.abs().max() for gradient in gradients) < 1e-6


def test_the_exact_divergence_is_that_of_all_logits():
    engine, teacher, data = student(), frozen(), rows()
    metrics, _ = updated(engine, [teacher], "reverse_kl_full", data)
    total = 0.0
    for row in range(len(data)):
        real = data["attention_mask"][row].bool()
        ids = data["input_ids"][row][real][None]
        num = int(data["attention_mask"][row, 7:].sum())
        mask = data["response_mask"][row, :num].bool()
        found = []
        for model in (engine.module, teacher.engine.module):
            states = plain_states(model, ids)
            logits = states @ model.get_output_embeddings().weight.T / TEMPERATURE
            found.append(logits[ids.shape[1] - num - 1 : -1].double().log_softmax(-1)[mask])
        total += (found[0].exp() * (found[0] - found[1])).sum().item()
    expected = total / int(data["response_mask"].sum())
    assert metrics["distillation/divergence"] == pytest.approx(expected, rel=1e-4)


def plain_states(model, ids):
    from verl.models.forward import hidden_states, packed_layout

    with torch.no_grad():
        positions = torch.arange(ids.shape[1])
        return hidden_states(model, ids[0], positions, packed_layout(model, [ids.shape[1]]))


@pytest.mark.parametrize("mode", ["k3", "forward_kl_topk", "forward_kl_full"])
def test_rows_learn_from_the_teacher_that_they_name(mode):
    data, teachers = rows(), [frozen(0.1), frozen(0.3, "llama")]
    data[TEACHER_INDEX] = torch.tensor([0, 1, 0, 1, 1, 0, 1])
    found = updated(student(), teachers, mode, data, micro=3)
    same(updated(student(), teachers, mode, data, micro=1), found)
    parts = []
    for number, teacher in enumerate(teachers):
        own = data.copy()
        is_other = own[TEACHER_INDEX] != number
        own["response_mask"] = own["response_mask"].masked_fill(is_other[:, None], 0)
        weight = int(own["response_mask"].sum()) / int(data["response_mask"].sum())
        _, gradients = updated(student(), [teacher], mode, own.exclude(TEACHER_INDEX))
        parts.append([weight * gradient for gradient in gradients])
    for one, first, second in zip(found[1], *parts, strict=True):
        torch.testing.assert_close(one, first + second, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["k3", "reverse_kl_full"])
def test_a_prompt_of_the_teachers_own_changes_what_it_says_of_the_same_tokens(mode):
    data, engine = rows(), student()
    width = data["input_ids"].shape[1] - data["responses"].shape[1]
    prompts, masks = data["input_ids"][:, :width], data["attention_mask"][:, :width]
    padding = torch.zeros(len(data), 2, dtype=torch.long)
    data[PROMPTS] = torch.cat([padding, prompts], dim=1)
    data[PROMPT_MASK] = torch.cat([padding, masks], dim=1)
    metrics, _ = updated(engine, [Teacher(engine)], mode, data)
    assert abs(metrics["distillation/loss"]) < 1e-6  # other columns, the same prompt
    data[PROMPTS][:, -1] = 5
    metrics, _ = updated(engine, [Teacher(engine)], mode, data)
    assert metrics["distillation/loss"] > 1e-3


def test_the_policy_gradient_takes_minus_the_divergence_as_advantage():
    data, engine, teacher = rows(), student(), frozen()
    _, gradients = updated(engine, [teacher], "k1", data, use_policy_gradient=True)
    answers = teacher_columns(
        [teacher], data, micro_batching=[list(range(7))], temperature=TEMPERATURE, top_k=0
    )
    old = data["old_log_probs"]
    data["advantages"] = -(old - answers[TEACHER_LOG_PROBS]) * data["response_mask"]
    actor = FSDPActorConfig(ppo_micro_batch_size_per_gpu=64)
    Policy(actor, engine).update_policy(data, rows_per_step=7, temperature=TEMPERATURE)
    kept = engine.state_dict()["optimizer"]["optimizer"]["state"].values()
    for one, state in zip(gradients, kept, strict=True):
        torch.testing.assert_close(one, state["gradient"], rtol=1e-4, atol=1e-6)


def test_the_parts_of_the_loss_add_up_and_clamps_hold():
    data, teacher = rows(), frozen()
    alone = updated(student(), [teacher], "reverse_kl_full", data)
    double = updated(student(), [teacher], "reverse_kl_full", data, distillation_loss_coef=2.0)
    for one, other in zip(alone[1], double[1], strict=True):
        torch.testing.assert_close(2 * one, other, rtol=1e-5, atol=1e-7)
    clamped, gradients = updated(student(), [teacher], "reverse_kl_full", data, loss_max_clamp=1e-4)
    assert clamped["distillation/divergence"] == pytest.approx(1e-4)
    assert max(gradient.abs().max() for gradient in gradients) == 0
