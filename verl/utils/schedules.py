"""How the learning rate moves: a factor on the optimizer's rate for each step.

Every schedule warms up linearly and then follows its own curve down to `min_lr_ratio`. A factor is
a plain function of the step, so a resumed run continues on exactly the same curve. Past the last
training step the factor stays where it ended.
"""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Curve = Callable[[float], float]
"""Progress after the warm-up (0 to 1) -> share of the way from the minimum (0) to the peak (1)."""


def get_constant_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1
) -> LambdaLR:
    """Linear from 0 to the full rate over `num_warmup_steps`, then constant."""
    factor = _factor(lambda _: 1.0, num_warmup_steps, num_training_steps=None)
    return LambdaLR(optimizer, factor, last_epoch)


def get_linear_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    last_epoch: int = -1,
) -> LambdaLR:
    """After the warm-up a straight line to `min_lr_ratio` of the rate at the last step."""
    factor = _factor(lambda t: 1 - t, num_warmup_steps, num_training_steps, min_lr_ratio)
    return LambdaLR(optimizer, factor, last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    init_lr_ratio: float | None = None,
) -> LambdaLR:
    """After the warm-up follow a cosine between the full rate and `min_lr_ratio` of it.

        factor = min + (1 - min) * (1 + cos(2 pi num_cycles t)) / 2        t: progress, 0 to 1

    The warm-up starts at `init_lr_ratio` of the rate, or at 0.
    """
    factor = _factor(
        _cosine(num_cycles), num_warmup_steps, num_training_steps, min_lr_ratio, init_lr_ratio
    )
    return LambdaLR(optimizer, factor, last_epoch)


def get_wsd_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    stable_ratio: float = 0.9,
) -> LambdaLR:
    """Warm up, stay, decay (arXiv:2404.06395): constant for `stable_ratio` of the steps after the
    warm-up, then the cosine of `get_cosine_schedule_with_warmup` over the rest."""
    if not 0 <= stable_ratio <= 1:
        raise ValueError(f"stable_ratio is {stable_ratio}; it must lie between 0 and 1")
    decay = _cosine(num_cycles)

    def curve(t: float) -> float:
        return 1.0 if t <= stable_ratio else decay((t - stable_ratio) / (1 - stable_ratio))

    factor = _factor(curve, num_warmup_steps, num_training_steps, min_lr_ratio)
    return LambdaLR(optimizer, factor, last_epoch)


def _cosine(num_cycles: float) -> Curve:
    return lambda t: (1 + math.cos(2 * math.pi * num_cycles * t)) / 2


def _factor(
    curve: Curve,
    num_warmup_steps: int,
    num_training_steps: int | None,
    min_lr_ratio: float = 0.0,
    init_lr_ratio: float | None = None,
) -> Callable[[int], float]:
    for name, ratio in ("min_lr_ratio", min_lr_ratio), ("init_lr_ratio", init_lr_ratio or 0.0):
        if not 0 <= ratio <= 1:
            raise ValueError(f"{name} is {ratio}; it must lie between 0 and 1")
    start = init_lr_ratio or 0.0

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return start + (1 - start) * step / num_warmup_steps
        if num_training_steps is None:
            return 1.0
        remaining = max(1, num_training_steps - num_warmup_steps)
        progress = min(1.0, (step - num_warmup_steps) / remaining)
        return min_lr_ratio + (1 - min_lr_ratio) * curve(progress)

    return factor
