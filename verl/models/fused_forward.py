"""A forward that takes the place of a module's own, and how the two are compared.

Nothing is trusted by name: the fused form of a module is run beside the module's own code on random
input, forward and backward, and is not used when they differ by more than rounding. Which modules
have a fused form, and what it computes, is left to `fuse` and `fused_norms`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

MAX_DIFFERENCE = 3e-5
"""Of the largest element, in fp32; exact and approximate gelu are ten times further apart."""

PROBE_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)
"""What a module's own code raises when it does not take the usual arguments."""


def choose(options: "list[FusedForward]") -> int | str:
    """The first option that gives the module's numbers, or why none does."""
    reasons = [option.mismatch() for option in options]
    return reasons.index(None) if None in reasons else "; ".join(str(r) for r in reasons)


class FusedForward(ABC):
    """A forward that takes the place of a module's own, which it keeps for what it cannot do."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.own_forward = module.forward

    def install(self) -> None:
        self.module.forward = self

    @abstractmethod
    def kind(self) -> Hashable:
        """Modules of one class and kind need to be compared once."""

    @abstractmethod
    def mismatch(self) -> str | None:
        """How this differs from the module's own forward on random input; None to rounding."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def random_inputs(*shapes: tuple[int, ...], device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def difference(
    own: Callable[..., Any],
    fused: Callable[..., Any],
    inputs: list[Tensor],
    dtype: torch.dtype,
    num_leaves: int | None = None,
) -> str | None:
    """Compare in fp32, where a difference in meaning shows, and in the model's dtype."""
    for kind in dict.fromkeys((torch.float32, dtype)):
        reason = compare(own, fused, inputs, kind, num_leaves=num_leaves)
        if reason is not None:
            return reason
    return None


def compare(
    own: Callable[..., Any],
    fused: Callable[..., Any],
    inputs: list[Tensor],
    dtype: torch.dtype,
    *,
    num_leaves: int | None = None,
    max_difference: float = MAX_DIFFERENCE,
) -> str | None:
    """How outputs and gradients for the first `num_leaves` inputs differ; None if to rounding."""
    inputs = [x.to(dtype) for x in inputs]
    try:
        expected = _outputs_and_gradients(own, inputs, num_leaves)
    except PROBE_ERRORS as error:
        return f"it cannot be compared ({error!r})"
    actual = _outputs_and_gradients(fused, inputs, num_leaves)
    limit = max(max_difference, 4 * torch.finfo(dtype).eps)
    for ours, theirs in zip(actual, expected, strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"the kernel gives {ours.dtype} {tuple(ours.shape)}"
        distance = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
        if not distance <= limit:
            return f"the kernel differs by {distance:.1e} of the largest element in {dtype}"
    return None


def _outputs_and_gradients(
    function: Callable[..., Any], inputs: list[Tensor], num_leaves: int | None
) -> list[Tensor]:
    with torch.enable_grad():
        leaves = [x.clone().requires_grad_() for x in inputs[:num_leaves]]
        outputs = function(*leaves, *inputs[len(leaves) :])
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        pulls = random_inputs(*(tuple(x.shape) for x in outputs), device=inputs[0].device)
        loss = torch.stack([(x * p).sum() for x, p in zip(outputs, pulls, strict=True)]).sum()
        return [*(x.detach() for x in outputs), *torch.autograd.grad(loss, leaves)]
