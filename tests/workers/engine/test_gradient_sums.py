"""Gradients of many passes: nothing is lost to the few bits of their format."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tests.tiny_models import tiny_model
from tests.workers.engine.test_one_device import batch, weighted_sum
from verl.config.optimizer import FSDPOptimizerConfig
from verl.workers.engine.gradient_sums import PASSES_AT_ONCE, GradientSums
from verl.workers.engine.one_device import OneDeviceEngine

NUM_ROWS = 512


def add_pass(parameter, value):
    share = torch.full_like(parameter, value)
    parameter.grad = share if parameter.grad is None else parameter.grad + share


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_thousand_equal_shares_make_a_thousand_times_one(dtype):
    parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
    sums = GradientSums([parameter])
    for _ in range(4000):
        add_pass(parameter, 1.0)
        sums.count_passes(1)
    sums.give_back()
    assert parameter.grad.dtype == dtype
    assert parameter.grad.tolist() == [torch.tensor(4000.0, dtype=dtype).item()] * 3


def test_few_passes_are_left_where_they_are():
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    sums = GradientSums([parameter])
    for _ in range(PASSES_AT_ONCE - 1):
        add_pass(parameter, 1.0)
        sums.count_passes(1)
    gradient = parameter.grad
    sums.give_back()
    assert parameter.grad is gradient


def test_a_step_that_is_begun_anew_has_nothing_of_the_last():
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    sums = GradientSums([parameter])
    add_pass(parameter, 1.0)
    sums.count_passes(PASSES_AT_ONCE)
    assert parameter.grad is None
    sums.clear()
    add_pass(parameter, 2.0)
    sums.give_back()
    assert parameter.grad.tolist() == [2.0] * 3


def test_parameters_without_a_gradient_and_fp32_ones_are_left_alone():
    full, idle = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    sums = GradientSums([full, idle])
    add_pass(full, 1.0)
    gradient = full.grad
    sums.count_passes(PASSES_AT_ONCE)
    sums.give_back()
    assert full.grad is gradient
    assert idle.grad is None


def bf16_engine():
    model = tiny_model("llama").to(torch.bfloat16)
    engine = OneDeviceEngine(lambda: model, FSDPOptimizerConfig(lr=0.0), max_grad_norm=1e9)
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


def test_a_step_that_was_given_up_leaves_nothing_to_the_next():
    engine, many, one = bf16_engine(), copies_of_a_row(PASSES_AT_ONCE), copies_of_a_row(1)
    engine.begin_step()
    passes = [[row] for row in range(len(many))]
    engine.add_to_step(many, weighted_sum, micro_batching=passes)
    engine.begin_step()
    engine.add_to_step(one, weighted_sum, micro_batching=[[0]])
    assert engine.finish_step().grad_norm == grad_norm(one)
