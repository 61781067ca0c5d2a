"""Norms in one kernel, together with the sum in front of them where a decoder layer makes one.

    layer i        total = x + attention(...)      and post_attention_layernorm(total)   one kernel
                   y = total + mlp(...)            and input_layernorm(y) of layer i + 1  one kernel

A layer of the usual form makes two sums, and a norm follows each: its own, and that of the layer
behind it (or the model's last). The layer returns the plain sum; what it has normed already waits
in a `Handover` until that norm is called with this very tensor. Nothing waits longer than one pass
through the layers, and a norm that finds nothing computes: the bits are the same.

`FusedForward` takes the place of a module's own forward. Nothing is trusted by name: the fused form
is run beside the module's own code on random input, forward and backward, and is not used when they
differ by more than rounding. The other fused forms are in `fuse`.
"""

import copy
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.modeling_layers import GradientCheckpointingLayer

from verl.models.kernels.availability import can_run_triton

LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_handover: "ContextVar[Handover]" = ContextVar("handover")
"""Set while a `LayerStack` runs."""


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


MAX_DIFFERENCE = 3e-5
"""Of the largest element, in fp32; exact and approximate gelu are ten times further apart."""


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


class FusedNorm(FusedForward):
    """weight * norm(x), or (1 + weight) * norm(x) with `is_offset`."""

    def __init__(self, module: nn.Module, *, is_offset: bool) -> None:
        from verl.models.kernels.rms_norm import (  # noqa: PLC0415 - needs triton
            add_rms_norm,
            rms_norm,
        )

        super().__init__(module)
        self.eps = self._eps(module)[0]
        self.is_offset = is_offset
        self.kernel = functools.partial(rms_norm, eps=self.eps, is_offset=is_offset)
        self.sum_kernel = functools.partial(add_rms_norm, eps=self.eps, is_offset=is_offset)

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        return weight is not None and weight.dim() == 1 and len(cls._eps(module)) == 1

    @staticmethod
    def _eps(module: nn.Module) -> list[float]:
        found = [vars(module)[name] for name in ("variance_epsilon", "eps") if name in vars(module)]
        return [eps for eps in found if isinstance(eps, float)]

    def kind(self) -> Hashable:
        return self.module.weight.shape, self.module.weight.dtype, self.eps

    def mismatch(self) -> str | None:
        def own(x: Tensor, weight: Tensor) -> Tensor:
            return functional_call(self.module, {"weight": weight}, (x,))

        weight = self.module.weight
        inputs = random_inputs((3, len(weight)), (len(weight),), device=weight.device)
        return difference(own, self.kernel, inputs, weight.dtype)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        handover = _handover.get(None)
        normed = None if handover is None else handover.take(self, hidden_states)
        if normed is not None:
            return normed
        if can_run_triton(hidden_states.device):
            return self.kernel(hidden_states, self.module.weight)
        return self.own_forward(hidden_states)

    def of_sum(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """residual + delta, and the norm of it."""
        if residual.shape == delta.shape and residual.dtype == delta.dtype:
            return self.sum_kernel(residual, delta, self.module.weight)
        total = residual + delta
        return total, self.kernel(total, self.module.weight)


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module, or a backward pass through it, runs more than its forward."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def only_norm(module: nn.Module) -> FusedNorm | None:
    """The module's kernel, if calling the module runs that and nothing else."""
    forward = module.forward
    if not isinstance(forward, FusedNorm) or has_hooks(module):
        return None
    return forward if type(module.weight) is nn.Parameter else None


# ---- comparing -----------------------------------------------------------------------------------


def _with_stand_ins(layer: Any) -> Any:
    """The layer with its own norms, and functions without weights between them."""
    twin = copy.copy(layer)
    twin._modules = {**layer._modules, "self_attn": _Attention(), "mlp": _MLP()}
    return twin


class _Attention(nn.Module):
    """Mixes tokens, and remembers what it was given beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.options: dict[str, object] = {}

    def forward(self, hidden_states: Tensor, **options: object) -> tuple[Tensor, None]:
        self.options = options
        return 2 * hidden_states.roll(1, dims=1), None


class _MLP(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square()


PROBE_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)
"""What a module's own code raises when it does not take the usual arguments."""


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


class FusedLayer(FusedForward):
    """total = x + attention(norm(x)), then total + mlp(norm(total))."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        parameters = inspect.signature(module.forward).parameters.values()
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.following: tuple[nn.Module, str] | None = None
        """Whose child of which name norms the layer's sum next."""

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """Whether it has the usual parts and nothing else, and kernels for both norms."""
        children = dict(module.named_children())
        is_usual = isinstance(module, GradientCheckpointingLayer) and "forward" not in vars(module)
        if not is_usual or children.keys() != LAYER_PARTS or module._parameters or module._buffers:
            return False
        norms = children["input_layernorm"], children["post_attention_layernorm"]
        return all(isinstance(norm.forward, FusedNorm) for norm in norms)

    def kind(self) -> Hashable:
        norms = self.module.input_layernorm.forward, self.module.post_attention_layernorm.forward
        # Whatever a layer may choose by; its index and sizes are not among them.
        switches = [x for x in vars(self.module).items() if isinstance(x[1], float | bool | str)]
        return tuple((norm.kind(), norm.is_offset) for norm in norms), tuple(switches)

    def mismatch(self) -> str | None:
        """Compared with stand-ins for attention and MLP, so that their weights hide nothing."""
        layer = _with_stand_ins(self.module)
        options = {name: object() for name in (*self.defaults, "layout")}
        own = functools.partial(layer.forward, **options)
        fused = functools.partial(FusedLayer(layer), **options)
        weight = self.module.input_layernorm.weight
        inputs = random_inputs((1, 5, len(weight)), device=weight.device)
        try:
            output = own(inputs[0])
        except PROBE_ERRORS as error:
            return f"it cannot be compared ({error!r})"
        if not isinstance(output, Tensor):
            return "it gives more than hidden states"
        if layer.self_attn.options != options:
            return "attention does not get what the layer gets"
        return difference(own, fused, inputs, weight.dtype)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        module = self.module
        norm = only_norm(module.post_attention_layernorm)
        if args or norm is None or not can_run_triton(hidden_states.device):
            return self.own_forward(hidden_states, *args, **kwargs)
        normed = module.input_layernorm(hidden_states)
        attended, _ = module.self_attn(hidden_states=normed, **{**self.defaults, **kwargs})
        total, normed = norm.of_sum(hidden_states, attended)
        return self._sum_for_next_norm(total, module.mlp(normed))

    def _sum_for_next_norm(self, residual: Tensor, delta: Tensor) -> Tensor:
        handover, norm = _handover.get(None), self._next_norm()
        if handover is None or norm is None:
            return residual + delta
        total, normed = norm.of_sum(residual, delta)
        handover.put(norm, total, normed)
        return total

    def _next_norm(self) -> FusedNorm | None:
        """The norm behind the layer, if it may run before whatever else happens in between."""
        module = self.module
        # A layer that is computed again in the backward pass gets no more than its arguments.
        is_recomputed = module.gradient_checkpointing and module.training
        if self.following is None or is_recomputed or has_hooks(module):
            return None
        owner, name = self.following
        # A hook there may be what brings the weights.
        return None if has_hooks(owner) else only_norm(owner.get_submodule(name))


# ---- from layer to layer -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Waiting:
    norm: FusedNorm
    total: Tensor
    normed: Tensor
    has_gradients: bool


class Handover:
    """One normed tensor on its way from a layer to the norm it was made for."""

    def __init__(self) -> None:
        self._waiting: _Waiting | None = None

    def put(self, norm: FusedNorm, total: Tensor, normed: Tensor) -> None:
        self._waiting = _Waiting(norm, total, normed, torch.is_grad_enabled())

    def take(self, norm: FusedNorm, x: Tensor) -> Tensor | None:
        """What `norm` gives for `x`, if that is what waits; nothing waits afterwards."""
        waiting, self._waiting = self._waiting, None
        if waiting is None or waiting.norm is not norm or waiting.total is not x:
            return None
        return waiting.normed if waiting.has_gradients == torch.is_grad_enabled() else None


class LayerStack:
    """The forward of a module that runs decoder layers; what they hand over ends with it."""

    def __init__(self, module: nn.Module) -> None:
        self.own_forward = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = _handover.set(Handover())
        try:
            return self.own_forward(*args, **kwargs)
        finally:
            _handover.reset(before)


def link_layers(model: nn.Module) -> None:
    """Tell every fused layer which norm follows it: the next layer's, or that of their owner."""
    for stack in list(model.modules()):
        for layers in stack.children():
            if isinstance(layers, nn.ModuleList) and any(map(is_fused_layer, layers)):
                _link(stack, list(layers))


def is_fused_layer(module: nn.Module) -> bool:
    return isinstance(module.forward, FusedLayer)


def _link(stack: nn.Module, layers: list[nn.Module]) -> None:
    norms = [name for name, child in stack.named_children() if isinstance(child.forward, FusedNorm)]
    last = (stack, norms[0]) if len(norms) == 1 else None
    behind = [(x, "input_layernorm") if is_fused_layer(x) else None for x in layers[1:]]
    for layer, following in zip(layers, [*behind, last], strict=True):
        if isinstance(layer.forward, FusedLayer):
            layer.forward.following = following
    if not isinstance(stack.forward, LayerStack):
        stack.forward = LayerStack(stack)


def choose(options: "list[FusedForward]") -> int | str:
    """The first option that gives the module's numbers, or why none does."""
    reasons = [option.mismatch() for option in options]
    return reasons.index(None) if None in reasons else "; ".join(str(r) for r in reasons)


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
