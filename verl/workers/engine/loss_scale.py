"""A factor on the loss that keeps fp16 gradients from vanishing (arXiv:1710.03740).

fp16 has no number between 0 and 6e-8, and most gradients of a language model lie there. The loss is
multiplied before the backward pass and the fp32 copy of the gradient is divided before anything
looks at it. The factor is a power of two, so neither rounds. It is halved whenever a gradient
overflows (the engine then computes it again) and doubled after a long run of good steps.
"""

import logging
from collections import deque
from typing import Any

logger = logging.getLogger(__name__)

INITIAL = 2.0**16
LARGEST = 2.0**24
GROWTH_INTERVAL = 2000
"""Good steps in a row before a larger factor is tried."""

WINDOW = 100
"""Attempts at a step over which those that overflowed are counted."""


class LossScale:
    """The factor of the next backward pass, and how the last steps went."""

    def __init__(self, value: float = INITIAL, growth_interval: int = GROWTH_INTERVAL) -> None:
        self.value = value
        self.growth_interval = growth_interval
        self.num_good_steps = 0
        self._is_skipped = deque[bool](maxlen=WINDOW)

    @property
    def num_recent_skips(self) -> int:
        """Attempts that overflowed among the last `WINDOW`."""
        return sum(self._is_skipped)

    def update(self, *, is_finite: bool) -> None:
        """Take note of an attempt at a step: whether its scaled gradient was finite."""
        self._is_skipped.append(not is_finite)
        if not is_finite:
            self._shrink()
            return
        self.num_good_steps += 1
        if self.num_good_steps >= self.growth_interval:
            self.value = min(2 * self.value, LARGEST)
            self.num_good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "num_good_steps": self.num_good_steps,
            "is_skipped": list(self._is_skipped),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = float(state["value"])
        self.num_good_steps = int(state["num_good_steps"])
        self._is_skipped = deque(map(bool, state["is_skipped"]), maxlen=WINDOW)

    def _shrink(self) -> None:
        self.num_good_steps = 0
        if self.value > 1:
            self.value /= 2
            return
        logger.warning(
            "the fp16 gradient is not finite even without a loss scale (%d of the last %d attempts "
            "overflowed): it is the loss or the model, not the scale. Look at the data, or set "
            "fsdp_config.dtype to bfloat16",
            self.num_recent_skips,
            len(self._is_skipped),
        )
