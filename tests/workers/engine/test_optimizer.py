import math

import pytest
import torch
from torch import nn

from verl.config.optimizer import FSDPOptimizerConfig
from verl.workers.engine.optimizer import MasterOptimizer


def optimizer_for(parameter, **options):
    return MasterOptimizer(
        [("weight", parameter)], FSDPOptimizerConfig(lr=0.1, weight_decay=0.0, **options)
    )


def test_a_first_adam_step_moves_a_weight_by_the_learning_rate():
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = optimizer_for(weight)
    weight.grad = torch.tensor([3.0, -4.0])
    result = optimizer.step(max_norm=100.0)
    assert result.grad_norm == 5.0
    assert result.is_applied
    torch.testing.assert_close(weight.detach(), torch.tensor([0.9, -1.9]))


def test_steps_too_small_for_bf16_add_up_in_the_master():
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    address = weight.data_ptr()
    optimizer = MasterOptimizer(
        [("weight", weight)], FSDPOptimizerConfig(lr=1e-4, weight_decay=0.0)
    )
    for _ in range(100):
        weight.grad = torch.ones(1, dtype=torch.bfloat16)
        optimizer.step(max_norm=10.0)
    assert weight.data_ptr() == address, "a rollout engine shares this storage"
    assert math.isclose(weight.item(), 0.99, abs_tol=0.003), "bf16 alone would have stayed at 1.0"


def test_weights_that_were_loaded_are_where_training_continues():
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    optimizer = optimizer_for(weight)
    weight.grad = torch.ones(1, dtype=torch.bfloat16)
    optimizer.step(max_norm=10.0)
    with torch.no_grad():
        weight.copy_(torch.tensor([5.0]))
    weight.grad = torch.ones(1, dtype=torch.bfloat16)
    optimizer.step(max_norm=10.0)
    assert math.isclose(weight.item(), 4.9, abs_tol=0.02), "the old master would have brought 0.8"


def test_clipping_scales_the_whole_gradient_to_the_norm():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = MasterOptimizer(
        [("weight", weight)],
        FSDPOptimizerConfig(lr=1.0, optimizer="SGD", weight_decay=0.0),
    )
    weight.grad = torch.tensor([3.0, 4.0])
    result = optimizer.step(max_norm=1.0)
    assert result.grad_norm == 5.0
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]), rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted():
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = optimizer_for(weight)
    weight.grad = torch.tensor([float("nan")])
    result = optimizer.step(max_norm=1.0)
    assert not result.is_applied
    assert weight.item() == 1.0
    assert optimizer.num_skipped_steps == 1
    assert weight.grad is None


def test_a_restored_optimizer_continues_bit_for_bit():
    def run(steps, restore_at=None):
        weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
        config = FSDPOptimizerConfig(lr=0.01, total_training_steps=10, lr_scheduler_type="cosine")
        optimizer = MasterOptimizer([("weight", weight)], config)
        for step in range(steps):
            if step == restore_at:
                state = optimizer.state_dict()
                weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
                restored = MasterOptimizer([("weight", weight)], config)
                restored.load_state_dict(state)
                optimizer = restored
            weight.grad = torch.tensor([0.5 + step, -1.0], dtype=torch.bfloat16)
            optimizer.step(max_norm=1.0)
            optimizer.schedule.step()
        return optimizer.masters["weight"].detach().clone()

    assert torch.equal(run(6), run(6, restore_at=3))


def rates_of(num_steps, **options):
    weight = nn.Parameter(torch.zeros(1))
    config = FSDPOptimizerConfig(
        lr=1.0, total_training_steps=10, lr_warmup_steps_ratio=0.2, min_lr_ratio=0.1, **options
    )
    optimizer = MasterOptimizer([("weight", weight)], config)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.learning_rate)
        weight.grad = torch.ones(1)
        optimizer.step(max_norm=1.0)
        optimizer.schedule.step()
    return rates


def test_warm_up_by_ratio_and_cosine_to_the_floor():
    rates = rates_of(11, lr_scheduler_type="cosine")
    assert rates[:3] == [0.0, 0.5, 1.0]
    assert math.isclose(rates[6], 0.55)
    assert math.isclose(rates[10], 0.1)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_schedule_that_falls_needs_its_length(kind):
    with pytest.raises(ValueError, match="total_training_steps is -1"):
        optimizer_for(nn.Parameter(torch.zeros(1)), lr_scheduler_type=kind)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_steps_counted_from_one_have_a_rate_from_the_first_on(kind):
    usual = rates_of(8, lr_scheduler_type=kind)
    assert usual[0] == 0.0
    assert rates_of(7, lr_scheduler_type=kind, zero_indexed_step=False) == usual[1:]


def test_moments_that_do_not_exist_yet_are_counted():
    def to_come(**options):
        weight = nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
        optimizer = MasterOptimizer([("weight", weight)], FSDPOptimizerConfig(lr=0.1, **options))
        before = optimizer.bytes_to_come()
        weight.grad = torch.ones_like(weight)
        optimizer.step(max_norm=1.0)
        return before, optimizer.bytes_to_come()

    assert to_come() == (80, 0), "two moments of ten fp32 numbers"
    assert to_come(optimizer="SGD", override_optimizer_config={"momentum": 0.9}) == (40, 0)
    assert to_come(optimizer="SGD")[0] == 0
