"""Gradients of many passes, added up in fp32.

A pass adds its share to a gradient of the parameter's own dtype. bf16 has eight bits, so a share
below a 256th of the sum changes nothing: of 1,024 equal shares, three quarters would be lost. So
after every few passes the sum is taken over into fp32, and goes back before the optimizer step. A
step of few passes is made without any of this.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

PASSES_AT_ONCE = 16
"""Added up in 16 bits, which costs about what rounding the sum to them does."""


class GradientSums:
    """The sums of one step, of those of `parameters` that are trained in 16 bits."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad and p.element_size() < 4]
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._num_passes = 0

    def clear(self) -> None:
        self._sums.clear()
        self._num_passes = 0

    def count_passes(self, number: int) -> None:
        """So many more passes have been added to the gradients."""
        self._num_passes += number
        if self._num_passes >= PASSES_AT_ONCE:
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
        self._num_passes = 0
