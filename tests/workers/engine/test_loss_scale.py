"""Training in fp16: scaled backward passes, fp32 gradients as if nothing had been scaled."""

import logging

import pytest
import torch
from torch import nn

from tests.tiny_models import tiny_model
from tests.utils.two_ranks import run_on_two_ranks
from tests.workers.engine.test_fsdp import skeleton
from tests.workers.engine.test_one_device import batch, weighted_sum
from verl.config.engine import FSDPEngineConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.utils.checkpoint.tensor_store import load_state, save_state
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.optimizer import INITIAL, LARGEST, LossScale, MasterOptimizer
from verl.workers.engine.zero1 import Zero1Engine

CUT = MicroBatching(rows=3)


def engine(dtype, **options):
    config = FSDPOptimizerConfig(**{"lr": 0.1, "optimizer": "SGD", "weight_decay": 0.0, **options})
    built = OneDeviceEngine(lambda: tiny_model("llama").to(dtype), config, max_grad_norm=1e9)
    built.initialize()
    return built


def small(columns, rows):
    """Times 65536 its gradient is within fp16's range."""
    return weighted_sum(columns, rows)[0] / 1000, {}


def test_the_fp16_gradient_is_the_fp32_gradient_to_rounding():
    half, full = (engine(dtype, lr=100.0) for dtype in (torch.float16, torch.float32))
    results = [built.train_batch(batch(), small, micro_batching=CUT) for built in (half, full)]
    assert results[0].is_applied
    assert results[0].loss_scale == INITIAL
    assert results[1].loss_scale is None
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=5e-3)
    assert half.optimizer is not None
    for master, weight in zip(
        half.optimizer.masters.values(), full.module.parameters(), strict=True
    ):
        torch.testing.assert_close(master, weight, rtol=2e-2, atol=2e-3)


def test_a_gradient_too_small_for_fp16_is_kept_by_the_scale():
    """A derivative of 1e-9 is 0 in fp16; multiplied by 65536 it is 6.6e-5."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = MasterOptimizer(
        [("weight", weight)], FSDPOptimizerConfig(lr=1.0, optimizer="SGD", weight_decay=0.0)
    )
    assert optimizer.loss_scale is not None
    tiny = torch.tensor(1e-9)
    (weight.float() * tiny).sum().backward()
    assert not weight.grad.any()
    weight.grad = None
    ((weight.float() * tiny).sum() * optimizer.loss_scale.value).backward()
    assert optimizer.step(max_norm=1.0).grad_norm == pytest.approx(1e-9, rel=1e-3)


def test_a_step_that_overflows_is_repeated_with_half_the_scale_and_no_rows_are_lost():
    half, full = engine(torch.float16), engine(torch.float32)

    def large(columns, rows):
        return 100 * weighted_sum(columns, rows)[0], {}

    result = half.train_batch(batch(), large, micro_batching=CUT)
    reference = full.train_batch(batch(), large, micro_batching=CUT)
    assert result.is_applied
    assert result.loss_scale is not None
    assert 1 <= result.loss_scale < INITIAL
    assert result.grad_norm == pytest.approx(reference.grad_norm, rel=5e-3)
    assert len(result.metrics) == 3, "of the attempt that counted"
    assert half.optimizer is not None
    assert half.optimizer.loss_scale is not None
    assert INITIAL / 2**half.optimizer.loss_scale.num_recent_skips == result.loss_scale
    assert half.policy_version == 1


def test_a_step_that_no_scale_helps_is_left_out_and_the_scale_is_as_before(caplog):
    built = engine(torch.float16)
    before = [p.detach().clone() for p in built.module.parameters()]

    def broken(columns, rows):
        return columns["log_probs"].sum() * float("nan"), {}

    result = built.train_batch(batch(), broken, micro_batching=CUT)
    assert not result.is_applied
    assert all(torch.equal(p, q) for p, q in zip(built.module.parameters(), before, strict=True))
    assert built.policy_version == 0
    assert "not the scale" in caplog.text
    assert built.optimizer is not None
    assert built.optimizer.loss_scale is not None
    assert built.optimizer.loss_scale.value == INITIAL


def test_ranks_scale_together_and_make_the_step_of_one(tmp_path):
    """A loss that overflows on both engines; rank 1 has fewer rows, and both repeat the passes."""
    passes = [[[0, 2], [4, 6]], [[1, 3], [5]]]

    def large(columns, rows):
        return 100 * weighted_sum(columns, rows)[0], {}

    def work(rank):
        config = FSDPOptimizerConfig(lr=1e-5, optimizer="SGD", weight_decay=0.0)
        sharded = FSDPEngine(
            lambda: tiny_model("llama"),
            config,
            build_skeleton=lambda: skeleton("llama"),
            config=FSDPEngineConfig(),
            compute_dtype=torch.float16,
            device="cpu",
            max_grad_norm=1e9,
        )
        whole = Zero1Engine(lambda: tiny_model("llama").half(), config, max_grad_norm=1e9)
        answers = []
        for built in (sharded, whole):
            built.initialize()
            result = built.train_batch(batch(), large, micro_batching=passes[rank])
            answers.append((result.is_applied, result.grad_norm, result.loss_scale))
        return answers

    full = engine(torch.float32)
    expected = full.train_batch(batch(), large, micro_batching=CUT).grad_norm
    first, second = run_on_two_ranks(work, tmp_path)
    assert first == second
    for is_applied, grad_norm, scale in first:
        assert is_applied
        assert grad_norm == pytest.approx(expected, rel=1e-2)
        assert scale < INITIAL


def test_the_scale_grows_after_enough_good_steps_and_not_without_end():
    scale = LossScale(value=8.0, growth_interval=3)
    for is_finite in (True, True, False, True, True):
        scale.update(is_finite=is_finite)
    assert scale.value == 4.0
    scale.update(is_finite=True)
    assert scale.value == 8.0
    for _ in range(2):
        scale.update(is_finite=True)
    assert scale.value == 8.0, "it counts from the last change"
    scale.update(is_finite=True)
    assert scale.value == 16.0
    scale.value = LARGEST
    for _ in range(3):
        scale.update(is_finite=True)
    assert scale.value == LARGEST


def test_the_window_of_skipped_steps_moves_on():
    scale = LossScale()
    for is_finite in [False] * 2 + [True] * 99:
        scale.update(is_finite=is_finite)
    assert scale.num_recent_skips == 1


def test_a_gradient_that_overflows_without_a_scale_is_said_to_be_another_problem(caplog):
    scale = LossScale(value=1.0)
    with caplog.at_level(logging.WARNING):
        scale.update(is_finite=False)
    assert scale.value == 1.0
    assert "1 of the last 1 attempts" in caplog.text


def test_scale_and_window_are_saved_and_continue_exactly(tmp_path):
    def run(built, steps):
        for _ in range(steps):
            assert built.train_batch(batch(), small, micro_batching=CUT).is_applied
        return built

    def fresh():
        built = engine(torch.float16, optimizer="AdamW", lr=0.01)
        built.optimizer.loss_scale.growth_interval = 2
        return built

    straight, first, second = run(fresh(), 5), run(fresh(), 3), fresh()
    save_state(tmp_path, "engine", first.state_dict())
    second.load_state_dict(load_state(tmp_path, "engine"))
    run(second, 2)
    assert second.optimizer.loss_scale.state_dict() == straight.optimizer.loss_scale.state_dict()
    for a, b in zip(second.module.parameters(), straight.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_from_another_number_format_starts_with_a_fresh_scale(tmp_path):
    other = engine(torch.float32)
    other.train_batch(batch(), weighted_sum, micro_batching=CUT)
    save_state(tmp_path, "engine", other.state_dict())
    half = engine(torch.float16)
    half.load_state_dict(load_state(tmp_path, "engine"))
    assert half.optimizer is not None
    assert half.optimizer.loss_scale is not None
    assert half.optimizer.loss_scale.value == INITIAL
    assert half.policy_version == 1
