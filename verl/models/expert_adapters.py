"""Low-rank adapters on experts: every expert of a layer has a pair of factors of its own.

    y[r] = W[e] x[r] + (alpha / rank) B[e] A[e] x[r]        for each row r of expert e

peft keeps the factors of a tensor of experts in two matrices, A (E rank, in) with the experts one
after the other and B (out, rank E) with the experts innermost, in a layer around the module
(`ParamWrapper`, one around the other where two tensors of a module are adapted). Its own forward
adds B A to all experts in every pass. Here the rows take two narrow grouped products instead
(`verl.models.experts`), which cost rank / width of the product beside them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from verl.models.experts import DOWN, GATED, UP, expert_modules, is_experts
from verl.utils.import_utils import require

EXPERTS_TARGET = "experts"
"""The name in `target_modules` that stands for the tensors of all experts."""


class Factors(NamedTuple):
    """One adapter of a tensor of experts: A (E, rank, in), B (E, out, rank)."""

    A: Tensor
    B: Tensor
    scale: float


class ExpertAdapter:
    """What peft's layer around a tensor of experts holds, as the grouped products take it."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def factors(self) -> Factors | None:
        """Those of the adapter that is on; None if there is none."""
        layer = self.layer
        if layer.disable_adapters:
            return None
        (name,) = layer.active_adapters
        A, B = (factor[name].weight for factor in (layer.lora_A, layer.lora_B))
        return Factors(*by_expert(A, B, layer.num_experts), layer.scaling[name])


def by_expert(A: Tensor, B: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """peft's matrices as (E, rank, in) and (E, out, rank)."""
    return (
        A.view(num_experts, -1, A.shape[-1]),
        B.view(B.shape[0], -1, num_experts).permute(2, 0, 1).contiguous(),
    )


def expert_tensors(model: nn.Module) -> list[str]:
    """Names that peft's `target_parameters` takes for the weights of all experts."""
    return sorted(
        {
            ".".join([*name.split(".")[-2:], leaf])
            for name, module in expert_modules(model).items()
            for leaf in (GATED, UP, DOWN)
            if leaf in module._parameters
        }
    )


def is_expert_layer(layer: Any) -> bool:
    """Whether this is peft's layer around a tensor of experts."""
    wrapper = require("peft.tuners.lora.layer", "peft").ParamWrapper
    return isinstance(layer, wrapper) and is_experts(layer.get_base_layer())


def adapts_experts(model: nn.Module) -> bool:
    return any("expert_adapters" in vars(module) for module in expert_modules(model).values())


def attach(layers: dict[str, Any]) -> None:
    """Let the experts inside peft's `layers` compute with their adapters themselves."""
    for layer in filter(is_expert_layer, layers.values()):
        experts = layer.get_base_layer()
        adapters = vars(experts).setdefault("expert_adapters", {})
        adapters[layer.parameter_name] = ExpertAdapter(layer)
        layer.forward = experts.forward


def adapted_weight(name: str, layer: Any) -> str:
    """The full name of the tensor that the layer of this name adapts."""
    base = layer.base_layer
    name = f"{name}.base_layer"
    while is_expert_layer(base):
        base, name = base.base_layer, f"{name}.base_layer"
    return f"{name}.{layer.parameter_name}"


def merge_experts(layer: Any, *, W: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    """W + scale B A for all experts, in fp32 and rounded once."""
    A, B = by_expert(A.float(), B.float(), layer.num_experts)
    delta = torch.bmm(B, A)  # (E, out, in)
    delta = delta.transpose(1, 2) if layer.get_base_layer().is_transposed else delta
    return (W.float() + scale * delta).to(W.dtype)
