"""Gradients of many passes, added up in fp32.

A pass adds its share to a gradient of the parameter's own dtype. bf16 has eight bits, so a share
below a 256th of the sum changes nothing: of 1,024 equal shares, three quarters would be lost. So
after some passes the sum is taken over into fp32, and goes back before the optimizer step. A step
of few passes is made without any of this, and so is one for whose sums the device has no room,
which is said once.
"""

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

PASSES_AT_ONCE = 32
"""Added up in 16 bits. Nothing of a gradient's length is lost by then, and its direction is off by
less than a hundredth; rounding the sum once costs a quarter of that."""


class GradientSums:
    """The sums of one step, of those of `parameters` that are trained in 16 bits.

    `has_room` says whether the device can spare so many bytes until the end of the step.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        has_room: Callable[[int], bool] = lambda num_bytes: True,
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad and p.element_size() < 4]
        self._has_room = has_room
        self._has_said_so = False
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._num_passes = 0

    def clear(self) -> None:
        self._sums.clear()
        self._num_passes = 0

    def count_passes(self, number: int) -> None:
        """So many more passes have been added to the gradients."""
        self._num_passes += number
        if self._num_passes >= PASSES_AT_ONCE:
            self._num_passes = 0
            if self._sums or self._can_begin():
                self._take_over()

    @torch.no_grad()
    def give_back(self) -> None:
        """Let the gradients be those of all passes."""
        if self._sums:
            self._take_over()
        while self._sums:
            parameter, total = self._sums.popitem()
            parameter.grad = total.to(parameter.dtype)
        self._num_passes = 0

    @torch.no_grad()
    def _take_over(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            if parameter in self._sums:
                self._sums[parameter] += parameter.grad
            else:
                self._sums[parameter] = parameter.grad.float()
            parameter.grad = None

    def _can_begin(self) -> bool:
        num_bytes = sum(4 * p.numel() for p in self._parameters if p.grad is not None)
        if self._has_room(num_bytes):
            return True
        if not self._has_said_so:
            logger.warning(
                "a step of more than %d passes adds its gradients up in 16 bits, for the device "
                "has no room for sums in fp32 (%.1f GiB): shares of single passes lose bits. Make "
                "fewer, larger passes (actor.ppo_max_token_len_per_gpu), or keep the optimizer's "
                "state in CPU memory (fsdp_config.optimizer_offload=True). This is said once",
                PASSES_AT_ONCE,
                num_bytes / 2**30,
            )
            self._has_said_so = True
        return False
