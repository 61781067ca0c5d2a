"""Let a Hugging Face model run its small operations in one kernel each, where that is the same.

Norms, gates and rotary embeddings are a few lines that every architecture writes anew, and on a
GPU they cost a pass over memory per line. Here a module instance gets another `forward`; its
parameters, its place in the model and its gradients stay. Nothing is trusted by name: each kind of
module is run beside its fused form on random input, forward and backward, and left alone when
they differ by more than rounding. On tensors a kernel cannot take, the module's own code runs.
Projections of one input become one product, which needs no comparison (`joined_linears`). Norms are
joined with the sums in front of them (`fused_norms`).

The rotary function belongs to the architecture's Python module, so it is wrapped there, once. The
wrapper acts only inside attention modules that were fused: other models of the architecture in
this process go on with the original.

Norms and MLPs that no kernel of ours fits (a gate and an up projection in one matrix, a norm
without a weight) are compiled with `torch.compile`, module by module, for any number of tokens at
once, and only inside `CompiledLayers.on()`, which training and scoring passes enter: the rollout
engine captures graphs of the module's own code. Whoever needs both to agree bit for bit does not
compile. Whole layers are not compiled; attention takes another layout in every pass.
"""

import functools
import logging
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.models.fused_norms import (
    FusedForward,
    FusedLayer,
    FusedNorm,
    choose,
    compare,
    difference,
    has_hooks,
    link_layers,
    random_inputs,
)
from verl.models.joined_linears import JoinedLinears, can_join
from verl.models.kernels.availability import can_run_triton
from verl.models.routing import is_generating
from verl.models.vision import vision_parts

logger = logging.getLogger(__name__)
ROTARY = "apply_rotary_pos_emb"
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_is_inside_fused_attention: ContextVar[bool] = ContextVar("fused_attention")


def fuse_model(model: nn.Module) -> list[str]:
    """Fuse what can be fused, in place; the names of the classes that were.

    Does nothing where kernels cannot run. Call it again after adding modules to the model.
    """
    if not can_run_triton(next(model.parameters()).device):
        return []
    fused = _fuse_modules(model, fused_forwards)
    fused += _fuse_modules(model, fused_layers)  # which look at the norms inside
    link_layers(model)
    return fused


def _fuse_modules(
    model: nn.Module, options_for: Callable[[nn.Module], list[FusedForward]]
) -> list[str]:
    verdicts: dict[Hashable, int | str] = {}
    fused, left = dict[str, None](), dict[str, str]()
    parts = vision_parts(model) if isinstance(model, PreTrainedModel) else []
    towers = {id(module) for part in parts for module in part.modules()}  # stay as they are
    for module in [module for module in model.modules() if id(module) not in towers]:
        options = [] if isinstance(module.forward, FusedForward) else options_for(module)
        if not options:
            continue
        kind = (type(module), options[0].kind())
        if kind not in verdicts:
            verdicts[kind] = choose(options)
        verdict = verdicts[kind]
        if isinstance(verdict, int):
            options[verdict].install()
            fused[type(module).__name__] = None
        else:
            left[type(module).__name__] = verdict
    for name, reason in left.items():
        logger.warning("%s is not fused and runs as it is: %s", name, reason)
    return list(fused)


def fused_forwards(module: nn.Module) -> list[FusedForward]:
    """What the module might be; several where only its numbers can tell."""
    name = type(module).__name__
    if FusedEmbedding.fits(module):
        return [FusedEmbedding(module)]
    children = {child for child, _ in module.named_children()}
    if name.endswith("RMSNorm") and FusedNorm.fits(module):
        return [FusedNorm(module, is_offset=False), FusedNorm(module, is_offset=True)]
    if {"gate_proj", "up_proj", "down_proj", "act_fn"} <= children:
        return [FusedGate(module, is_gelu=False), FusedGate(module, is_gelu=True)]
    if name.endswith("Attention") and ROTARY in vars(_python_module(module)):
        return [FusedAttention(module)]
    return []


def fused_layers(module: nn.Module) -> list[FusedForward]:
    return [FusedLayer(module)] if FusedLayer.fits(module) else []


class FusedEmbedding(FusedForward):
    """The same lookup; its backward pass does not make the host wait."""

    def __init__(self, module: nn.Module) -> None:
        from verl.models.kernels.embedding import embedding  # noqa: PLC0415 - needs triton

        super().__init__(module)
        self.kernel = functools.partial(embedding, padding_id=self.module.padding_idx)

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        if type(module) is not nn.Embedding:
            return False
        return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse

    def kind(self) -> Hashable:
        return self.module.weight.shape, self.module.weight.dtype, self.module.padding_idx

    def mismatch(self) -> str | None:
        weight, padding_id = self.module.weight, self.module.padding_idx
        last = len(weight) - 1
        chosen = [0, last, last // 2, 0, 0, last if padding_id is None else padding_id, 0]
        ids = torch.tensor([chosen * 5], device=weight.device)

        def own(table: Tensor) -> Tensor:
            return nn.functional.embedding(ids, table, padding_id)

        def fused(table: Tensor) -> Tensor:
            return self.kernel(ids, table)

        inputs = random_inputs((len(weight), 5), device=weight.device)
        return difference(own, fused, inputs, weight.dtype)

    def __call__(self, input: Tensor) -> Tensor:
        weight = self.module.weight
        if can_run_triton(input.device) and type(weight) is nn.Parameter:
            return self.kernel(input, weight)
        return self.own_forward(input)


class FusedGate(FusedForward):
    """down(act(gate(x)) * up(x)) with silu, or gelu in its tanh form with `is_gelu`."""

    def __init__(self, module: nn.Module, *, is_gelu: bool) -> None:
        from verl.models.kernels.swiglu import (  # noqa: PLC0415 - needs triton
            gated,
            gated_down,
            gated_halves,
        )

        super().__init__(module)
        self.is_gelu = is_gelu
        self.kernel = functools.partial(gated, is_gelu=is_gelu)
        self.halves_kernel = functools.partial(gated_halves, is_gelu=is_gelu)
        self.down_kernel = functools.partial(gated_down, is_gelu=is_gelu)
        self.joined: JoinedLinears | None = None

    def kind(self) -> Hashable:
        weight = next(self.module.parameters())
        return weight.shape, weight.dtype, repr(self.module.act_fn)

    def mismatch(self) -> str | None:
        weight = next(self.module.parameters())

        def own_gate(gate: Tensor, up: Tensor) -> Tensor:
            return self.module.act_fn(gate) * up

        inputs = random_inputs((3, 101), (3, 101), device=weight.device)
        reason = difference(own_gate, self.kernel, inputs, torch.float32)
        if reason is not None:
            return reason
        # Behind two matrix products fp32 may be coarser than fp32 (tf32).
        inputs = random_inputs((3, self.module.gate_proj.in_features), device=weight.device)
        return compare(self.own_forward, self, inputs, weight.dtype, max_difference=1e-3)

    def install(self) -> None:
        super().install()
        linears = (self.module.gate_proj, self.module.up_proj)
        self.joined = JoinedLinears(linears) if can_join(linears) else None

    def __call__(self, x: Tensor) -> Tensor:
        if not can_run_triton(x.device):
            return self.own_forward(x)
        module, joined = self.module, self.joined
        # An adapter on either layer has taken its place, and must not be left out.
        own = [module.gate_proj, module.up_proj]
        if joined is not None and joined.linears == own and joined.is_whole:
            both = joined.product(x)
            if is_untouched(module.down_proj):
                return self.down_kernel(both, module.down_proj.weight)
            return module.down_proj(self.halves_kernel(both))
        return module.down_proj(self.kernel(module.gate_proj(x), module.up_proj(x)))


def is_untouched(layer: nn.Module) -> bool:
    """Whether calling it is a product with its weight and nothing else."""
    is_plain = type(layer) is nn.Linear and layer.bias is None
    # A layer that only the rollout engine computes otherwise is itself in all other passes.
    is_plain &= "forward" not in vars(layer) or (has_other_form(layer) and not is_generating())
    return is_plain and not has_hooks(layer) and type(layer.weight) is nn.Parameter


def has_other_form(layer: nn.Module) -> bool:
    return type(layer.forward).__name__ == "Fp8Forward"


class FusedAttention(FusedForward):
    """The attention module's own forward, with the rotary kernel switched on inside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.joined: JoinedLinears | None = None

    def install(self) -> None:
        super().install()
        namespace = vars(_python_module(self.module))
        if not isinstance(namespace[ROTARY], SwitchedRotary):
            namespace[ROTARY] = SwitchedRotary(namespace[ROTARY])
        children = dict(self.module.named_children())
        linears = [children[name] for name in PROJECTIONS if name in children]
        if len(linears) == len(PROJECTIONS) and can_join(linears):
            self.joined = JoinedLinears(linears)  # pyright: ignore[reportArgumentType]
            self.joined.install()

    def kind(self) -> Hashable:
        return next(self.module.parameters()).dtype

    def mismatch(self) -> str | None:
        weight = next(self.module.parameters())
        own = vars(_python_module(self.module))[ROTARY]
        shapes = (1, 4, 5, 16), (1, 2, 5, 16), (1, 5, 16), (1, 5, 16)
        inputs = random_inputs(*shapes, device=weight.device)
        switched = own if isinstance(own, SwitchedRotary) else SwitchedRotary(own)
        return difference(switched.own, switched.kernel, inputs, weight.dtype, num_leaves=2)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = _is_inside_fused_attention.set(True)
        try:
            return self.own_forward(*args, **kwargs)
        finally:
            _is_inside_fused_attention.reset(before)
            # A pass that ran out of memory between q and v must not stay in what is left.
            if self.joined is not None:
                self.joined.forget()


class SwitchedRotary:
    """An architecture's `apply_rotary_pos_emb`, replaced by the kernel inside fused attention."""

    def __init__(self, own: Callable[..., tuple[Tensor, Tensor]]) -> None:
        from verl.models.kernels.embedding import apply_rotary, misfit  # noqa: PLC0415 - needs triton

        functools.update_wrapper(self, own)
        self.own = own
        self.kernel, self.misfit = apply_rotary, misfit

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        is_usual = _is_inside_fused_attention.get(False) and not args and not kwargs
        if is_usual and can_run_triton(q.device) and self.misfit(q, k, cos, sin) is None:
            return self.kernel(q, k, cos, sin)
        return self.own(q, k, cos, sin, *args, **kwargs)


def _python_module(module: nn.Module) -> Any:
    """Where the names that the module's forward uses are looked up."""
    return sys.modules[type(module).forward.__module__]


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


def fits(module: nn.Module) -> bool:
    """Whether it is a norm or an MLP of the architecture's own that runs as it is.

    Experts (weights of three dimensions) are not: how many tokens each gets changes every pass.
    """
    kind = type(module)
    is_own = not kind.__module__.startswith("torch.")
    is_plain = not isinstance(module.forward, FusedForward | CompiledForward)
    is_named = kind.__name__.endswith(("Norm", "MLP"))
    return is_own and is_plain and is_named and all(p.dim() <= 2 for p in module.parameters())
