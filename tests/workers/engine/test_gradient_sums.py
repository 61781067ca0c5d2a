"""Gradients of many passes: nothing is lost to the few bits of their format."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tests.tiny_models import tiny_model
from tests.workers.engine.test_one_device import batch, weighted_sum
from verl.config.optimizer import FSDPOptimizerConfig
from verl.workers.engine.memory import USABLE_SHARE, DeviceMemory
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.stepping import MICRO_BATCHES_IN_16_BITS, GradientSums

NUM_ROWS = 320


def add_pass(parameter, value):
    share = torch.full_like(parameter, value)
    parameter.grad = share if parameter.grad is None else parameter.grad + share


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_thousand_equal_shares_make_a_thousand_times_one(dtype):
    parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
    sums = GradientSums([parameter])
    for _ in range(4000):
        add_pass(parameter, 1.0)
        sums.count(1)
    sums.restore()
    assert parameter.grad.dtype == dtype
    assert parameter.grad.tolist() == [torch.tensor(4000.0, dtype=dtype).item()] * 3


def test_few_passes_are_left_where_they_are():
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    sums = GradientSums([parameter])
    for _ in range(MICRO_BATCHES_IN_16_BITS - 1):
        add_pass(parameter, 1.0)
        sums.count(1)
    gradient = parameter.grad
    sums.restore()
    assert parameter.grad is gradient


def test_a_step_that_is_begun_anew_has_nothing_of_the_last():
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    sums = GradientSums([parameter])
    add_pass(parameter, 1.0)
    sums.count(MICRO_BATCHES_IN_16_BITS)
    assert parameter.grad is None
    sums.clear()
    add_pass(parameter, 2.0)
    sums.restore()
    assert parameter.grad.tolist() == [2.0] * 3


def test_parameters_without_a_gradient_and_fp32_ones_are_left_alone():
    full, idle = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    sums = GradientSums([full, idle])
    add_pass(full, 1.0)
    gradient = full.grad
    sums.count(MICRO_BATCHES_IN_16_BITS)
    sums.restore()
    assert full.grad is gradient
    assert idle.grad is None


def test_without_room_gradients_stay_where_they_are_and_that_is_said_once(caplog):
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    asked = []
    sums = GradientSums([parameter], lambda num_bytes: bool(asked.append(num_bytes)))
    for _ in range(3):
        sums.clear()
        parameter.grad = None
        for _ in range(4 * MICRO_BATCHES_IN_16_BITS):
            add_pass(parameter, 1.0)
            sums.count(1)
        sums.restore()
        assert parameter.grad.tolist() == [4.0 * MICRO_BATCHES_IN_16_BITS] * 3
    assert set(asked) == {12}
    (record,) = caplog.records
    assert "ppo_max_token_len_per_gpu" in record.getMessage()


def test_so_many_passes_may_be_added_up_in_16_bits():
    shares = torch.randn(
        MICRO_BATCHES_IN_16_BITS, 50_000, generator=torch.Generator().manual_seed(1)
    )
    exact, total = shares.double().sum(0), shares[0].bfloat16()
    for share in shares[1:]:
        total += share.bfloat16()
    assert (total.double() - exact).norm() < 0.01 * exact.norm()
    assert total.double().norm() == pytest.approx(exact.norm().item(), rel=1e-3)


class FullMemory(DeviceMemory):
    """Has so many bytes besides those in use."""

    def __init__(self, free_bytes):
        self.free_bytes = free_bytes

    total_bytes = 1 << 40

    def reset_peak(self):
        pass

    def peak_bytes(self):
        return int(USABLE_SHARE * self.total_bytes) - self.free_bytes


def bf16_engine(memory=None):
    model = tiny_model("llama").to(torch.bfloat16)
    engine = OneDeviceEngine(
        lambda: model, FSDPOptimizerConfig(lr=0.0), max_grad_norm=1e9, device_memory=memory
    )
    engine.initialize()
    return engine


def copies_of_a_row(number):
    row = batch(7)[6:]  # the first has no response
    columns = {name: row[name].repeat(number, 1) for name in row.keys()}  # noqa: SIM118
    return TensorDict(columns, batch_size=[number])


def grad_norm(rows):
    passes = [[row] for row in range(len(rows))]
    return bf16_engine().train_batch(rows, weighted_sum, micro_batching=passes).grad_norm


def test_equal_rows_in_passes_of_their_own_give_a_multiple_of_one():
    """A sum in bf16 would stand still at 256 times one row."""
    expected = NUM_ROWS * grad_norm(copies_of_a_row(1))
    assert expected > 0
    assert grad_norm(copies_of_a_row(NUM_ROWS)) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("has_room", [True, False])
def test_sums_are_made_where_the_device_has_room_for_them(has_room):
    num_bytes = 4 * tiny_model("llama").num_parameters()
    engine = bf16_engine(FullMemory(num_bytes if has_room else num_bytes - 2))
    rows = copies_of_a_row(MICRO_BATCHES_IN_16_BITS + 1)
    are_moved = []

    def watched(columns, rows):
        are_moved.append(all(p.grad is None for p in engine.module.parameters()))
        return weighted_sum(columns, rows)

    passes = [[row] for row in range(len(rows))]
    assert engine.train_batch(rows, watched, micro_batching=passes).grad_norm > 0
    assert are_moved[0], "no gradient yet"
    assert not any(are_moved[1:-1])
    assert are_moved[-1] == has_room


def test_a_step_that_was_given_up_leaves_nothing_to_the_next():
    engine, many, one = (
        bf16_engine(),
        copies_of_a_row(MICRO_BATCHES_IN_16_BITS + 1),
        copies_of_a_row(1),
    )
    losses = [weighted_sum] * MICRO_BATCHES_IN_16_BITS

    def fails_at_last(columns, rows):
        return losses.pop()(columns, rows)

    passes = [[row] for row in range(len(many))]
    with pytest.raises(IndexError):
        engine.train_batch(many, fails_at_last, micro_batching=passes)
    assert engine.train_batch(one, weighted_sum, micro_batching=[[0]]).grad_norm == grad_norm(one)
