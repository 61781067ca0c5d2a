"""Norms and MLPs that no kernel of ours fits, compiled with `torch.compile`.

`verl.models.fuse` takes the usual forms. What an architecture writes differently (a gate and an up
projection in one matrix, a norm without a weight) is compiled here instead, module by module, for
any number of tokens at once. Only inside `on()`, which training and scoring passes enter: the
rollout engine captures graphs of the module's own code. Whoever needs both to agree bit for bit
does not compile. Whole layers are not compiled; attention takes another layout in every pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from verl.models.fuse import FusedForward


class CompiledLayers:
    """The compiled modules of one model; `names` are their classes."""

    def __init__(self, model: nn.Module) -> None:
        self._forwards = [CompiledForward(module) for module in model.modules() if fits(module)]
        self.names = sorted({type(forward.module).__name__ for forward in self._forwards})

    @contextmanager
    def on(self) -> Iterator[None]:
        """The compiled code runs while the context lasts, in backward passes too."""
        for forward in self._forwards:
            forward.is_on = True
        try:
            yield
        finally:
            for forward in self._forwards:
                forward.is_on = False


class CompiledForward:
    """A module's forward in two forms. A plain attribute chooses, not a context variable:
    activations are computed again on a thread of the backward pass."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.is_on = False
        self._own = module.forward
        self._compiled = torch.compile(module.forward, dynamic=True)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._compiled if self.is_on else self._own)(*args, **kwargs)


def fits(module: nn.Module) -> bool:
    """Whether it is a norm or an MLP of the architecture's own that runs as it is.

    Experts (weights of three dimensions) are not: how many tokens each gets changes every pass.
    """
    kind = type(module)
    is_own = not kind.__module__.startswith("torch.")
    is_plain = not isinstance(module.forward, FusedForward | CompiledForward)
    is_named = kind.__name__.endswith(("Norm", "MLP"))
    return is_own and is_plain and is_named and all(p.dim() <= 2 for p in module.parameters())
