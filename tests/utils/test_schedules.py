import math

import pytest
import torch

from verl.utils.torch_functional import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule_with_warmup,
)


def rates(make, *args, num_steps: int, **kwargs) -> list[float]:
    """The learning rate of each step, for a full rate of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make(optimizer, *args, **kwargs)
    seen = []
    for _ in range(num_steps):
        seen.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return seen


def test_constant_after_a_linear_warm_up():
    assert rates(get_constant_schedule_with_warmup, 2, num_steps=4) == [0, 0.5, 1, 1]
    assert rates(get_constant_schedule_with_warmup, 0, num_steps=2) == [1, 1]


def test_cosine_by_hand():
    seen = rates(get_cosine_schedule_with_warmup, 2, 6, num_steps=9, min_lr_ratio=0.2)
    quarter = 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2
    three_quarters = 0.2 + 0.8 * (1 + math.cos(3 * math.pi / 4)) / 2
    expected = [0, 0.5, 1, quarter, 0.6, three_quarters, 0.2, 0.2, 0.2]
    assert seen == pytest.approx(expected)


def test_cosine_warms_up_from_the_initial_ratio():
    seen = rates(get_cosine_schedule_with_warmup, 2, 4, num_steps=3, init_lr_ratio=0.5)
    assert seen == pytest.approx([0.5, 0.75, 1])


def test_a_whole_cosine_cycle_comes_back_up():
    seen = rates(get_cosine_schedule_with_warmup, 0, 4, num_steps=5, num_cycles=1.0)
    assert seen == pytest.approx([1, 0.5, 0, 0.5, 1])


def test_linear_reaches_the_minimum_at_the_last_step():
    seen = rates(get_linear_schedule_with_warmup, 1, 5, num_steps=7, min_lr_ratio=0.2)
    assert seen == pytest.approx([0, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_warmup_stable_decay():
    seen = rates(get_wsd_schedule_with_warmup, 1, 5, num_steps=7, stable_ratio=0.5)
    assert seen == pytest.approx([0, 1, 1, 1, 0.5, 0, 0])


def test_a_resumed_schedule_continues_on_the_same_curve():
    straight = rates(get_cosine_schedule_with_warmup, 2, 10, num_steps=10)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    first = get_cosine_schedule_with_warmup(optimizer, 2, 10)
    for _ in range(5):
        optimizer.step()
        first.step()
    second = get_cosine_schedule_with_warmup(optimizer, 2, 10)
    second.load_state_dict(first.state_dict())
    seen = []
    for _ in range(5):
        seen.append(second.get_last_lr()[0])
        optimizer.step()
        second.step()
    assert seen == straight[5:]


@pytest.mark.parametrize("name", ["min_lr_ratio", "init_lr_ratio"])
def test_a_ratio_lies_between_zero_and_one(name):
    with pytest.raises(ValueError, match=f"{name} is 1.5"):
        rates(get_cosine_schedule_with_warmup, 1, 5, num_steps=1, **{name: 1.5})
    with pytest.raises(ValueError, match="stable_ratio is 2"):
        rates(get_wsd_schedule_with_warmup, 1, 5, num_steps=1, stable_ratio=2)
