"""Mixtures of experts: every expert's rows as one grouped product, registered with transformers.

    tokens --route--> (token, expert) --sort by expert--> rows --experts--> rows --sum--> tokens

Models are built with `EXPERTS` as their experts implementation. A pair becomes a row; rows of one
expert lie side by side, so each projection is one grouped product instead of a loop over experts,
and nothing waits for the device to say how many rows an expert has. Sums over a token's experts run
in the order of its routes, in fp32, without atomic additions: the same bits every time.

On CUDA a product is torch's `grouped_mm`, or our Triton kernel where torch has none for the dtype
and where exact mode asks for sums in one order. On a CPU it is a loop in plain torch, the reference
of both; exact mode computes each expert's rows in tiles of one shape there (`exact`).

With `ExpertGroup` the experts of a layer are spread over ranks (expert parallelism): rows travel to
the rank that has their expert and back, and the gradient of an expert is whole on its rank. Ranks
that generate together have all tokens anyway: each computes the rows of its own experts
(`LayerRouting.own_experts`), and what they give is summed (`tensor_parallel`).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ExpertsInterface

from verl.models.exact import ROWS, exact_linear
from verl.models.kernels.availability import can_run_triton
from verl.models.routing import LayerRouting, Routing, decoder_layer_of, install
from verl.utils.device import get_device_capability
from verl.utils.distributed import collective_device

EXPERTS = "verl"
COEFFICIENT = "router_aux_loss_coef"
GATED, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"
SILU = (nn.SiLU, SiLUActivation)
ALIGNED_BYTES = 16
"""torch's grouped product takes rows and weights that begin at a multiple of this."""


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold the experts of a layer in tensors of three dimensions, by name."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def is_experts(module: nn.Module) -> bool:
    """Whether transformers lets its experts be computed by a registered function."""
    return {"is_transposed", "has_bias", "num_experts"} <= vars(module).keys()


def prepare_experts(model: PreTrainedModel) -> None:
    """Let all experts of the model run here, and their routers be recorded and replayed.

    A second call changes nothing.
    """
    experts = expert_modules(model)
    if not experts or Routing.of(model) is not None:
        return
    for number, (name, module) in enumerate(experts.items()):
        routing = LayerRouting(number, decoder_layer_of(name, number), vars(module)["num_experts"])
        vars(module)["routing"] = routing
        install(model.get_submodule(name.rpartition(".")[0]), routing)
        vars(module)["config"]._experts_implementation = EXPERTS
    model.config._experts_implementation = EXPERTS


def set_aux_loss(
    model: PreTrainedModel, override_config: Mapping[str, Any] | None
) -> PreTrainedModel:
    """Turn the auxiliary loss on if the user states its coefficient, or asks for the logits."""
    stated = override_config or {}
    routing = Routing.of(model)
    is_asked = stated.get(COEFFICIENT) or stated.get("output_router_logits")
    if not is_asked or routing is None:
        return model
    for layer in routing.layers:
        layer.aux_loss_coef = float(vars(model.config.get_text_config())[COEFFICIENT])
    model.config.get_text_config().output_router_logits = False  # they are kept here already
    return model


def routed_experts(
    module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor, **_: Any
) -> Tensor:
    """The function transformers calls: (N, hidden) for routes and their weights, (N, k) each."""
    routing = vars(module).get("routing")
    assert isinstance(routing, LayerRouting), "prepare_experts has run on this model"
    routing.note(index)
    own, num_experts = routing.own_experts, routing.num_experts
    if own is not None:  # the pairs of other ranks' experts sort behind this rank's
        num_experts = len(own)
        is_own = (index >= own.start) & (index < own.stop)
        index = torch.where(is_own, index - own.start, num_experts)
    order, positions, ends = sort_pairs(index, num_experts)
    rows = _TakeRows.apply(hidden, order // index.shape[-1], positions)
    assert isinstance(rows, Tensor)
    if routing.group is None:
        rows = expert_outputs(module, rows, ends, is_exact=routing.is_exact)
    else:
        rows = routing.group.run(module, rows, ends, is_exact=routing.is_exact)
    if own is not None:  # what kernels leave there is undefined
        rows = rows.masked_fill((_places(ends, len(rows)) >= ends[-1])[:, None], 0)
    return _SumRows.apply(rows, weights, positions).to(hidden.dtype)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]


ExpertsInterface.register(EXPERTS, routed_experts)


def sort_pairs(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of routes (N, k): the pairs in the order of their experts, (N k,); where each pair went,
    (N, k); and the end of each expert's rows, (E,). Nothing waits for the device."""
    flat = index.flatten()
    experts, order = flat.sort(stable=True)
    every = torch.arange(num_experts, device=index.device, dtype=experts.dtype)
    ends = torch.searchsorted(experts, every, right=True, out_int32=True)
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order), device=index.device)
    return order, positions.view_as(index), ends


def expert_outputs(module: nn.Module, rows: Tensor, ends: Tensor, *, is_exact: bool) -> Tensor:
    """What each row's expert makes of it: down(act(gate(x)) * up(x)), with biases if it has any."""
    if is_exact and not can_run_triton(rows.device):
        return _exact_outputs(module, rows, ends.tolist())
    first = GATED if GATED in module._parameters else UP
    inner = _activate(module, _project(module, first, rows, ends, is_exact))
    return _project(module, DOWN, inner, ends, is_exact)


def _project(module: nn.Module, name: str, rows: Tensor, ends: Tensor, is_exact: bool) -> Tensor:
    low_precision = vars(module).get("low_precision", {}).get(name)  # `fp8.Fp8Experts`
    if low_precision is not None and low_precision.is_used:
        output = low_precision(rows, ends)
    else:
        weight = local_weight(module, name)  # (E, out, in), or (E, in, out)
        weight = weight if module.is_transposed else weight.transpose(1, 2)
        output = grouped_product(rows, weight, ends, in_one_order=is_exact)
    adapter = local_adapter(module, name)
    if adapter is not None:
        A, B = (factor.transpose(1, 2) for factor in adapter[:2])
        inner = grouped_product(rows, A, ends, in_one_order=is_exact)
        inner = grouped_product(inner, B, ends, in_one_order=is_exact)
        output = output + adapter.scale * inner
    if not module.has_bias:
        return output
    experts = torch.searchsorted(ends, _places(ends, len(rows)), right=True)
    return output + local_weight(module, f"{name}_bias")[experts.clamp_max(len(ends) - 1)]


def _places(ends: Tensor, num_rows: int) -> Tensor:
    return torch.arange(num_rows, device=ends.device, dtype=ends.dtype)


def local_weight(module: nn.Module, name: str) -> Tensor:
    """The parameter; of one whose experts are spread over ranks, this rank's in the rows' dtype."""
    weight = module._parameters[name]
    assert weight is not None, f"{type(module).__name__} has {name}"
    if not isinstance(weight, DTensor):
        return weight
    return vars(module)["routing"].group.local(weight)


def local_adapter(module: nn.Module, name: str) -> Any:
    """The factors (`expert_adapters.Factors`) of the experts on this rank; None without adapter."""
    adapter = vars(module).get("expert_adapters", {}).get(name)
    factors = None if adapter is None else adapter.factors()
    group = vars(module)["routing"].group
    if factors is None or group is None:
        return factors
    return factors._replace(A=group.own_experts(factors.A), B=group.own_experts(factors.B))


def _activate(module: nn.Module, both: Tensor) -> Tensor:
    if GATED not in module._parameters:
        return module.act_fn(both)  # pyright: ignore[reportCallIssue]
    is_usual = type(module)._apply_gate.__name__ == "_default_apply_gate"  # pyright: ignore[reportAttributeAccessIssue]
    if is_usual and isinstance(module.act_fn, SILU) and can_run_triton(both.device):
        from verl.models.kernels.swiglu import gated_halves  # noqa: PLC0415 - needs triton

        return gated_halves(both)
    return module._apply_gate(both)  # pyright: ignore[reportCallIssue]


def _exact_outputs(module: nn.Module, rows: Tensor, ends: list[int]) -> Tensor:
    """Expert by expert, in tiles of one shape; every number in between is padded to them too."""
    outputs, start = [], 0
    for expert, end in enumerate(ends):
        if end > start:
            part = F.pad(rows[start:end], (0, 0, 0, -(end - start) % ROWS))
            for name in (GATED if GATED in module._parameters else UP, DOWN):
                weight = local_weight(module, name)[expert]
                weight = weight.t() if module.is_transposed else weight
                bias = local_weight(module, f"{name}_bias")[expert] if module.has_bias else None
                adapter, rows_in = local_adapter(module, name), part
                part = exact_linear(part, weight, bias)
                if adapter is not None:
                    inner = exact_linear(rows_in, adapter.A[expert], None)
                    part = part + adapter.scale * exact_linear(inner, adapter.B[expert], None)
                part = part if name == DOWN else _activate(module, part)
            outputs.append(part[: end - start])
            start = end
    return torch.cat([*outputs, rows.new_zeros(len(rows) - start, rows.shape[1])])


# ---- grouped products ----------------------------------------------------------------------------


def grouped_product(
    rows: Tensor, weight: Tensor, ends: Tensor, *, in_one_order: bool = False
) -> Tensor:
    """rows (S, in) of group e times weight[e] of (E, in, out); rows behind the last end give 0.

    `in_one_order` asks for sums whose order does not depend on how many rows there are.
    """
    if not in_one_order and _torch_can(rows, weight):
        return F.grouped_mm(rows, weight, offs=ends)
    return _GroupedProduct.apply(rows, weight, ends)  # pyright: ignore[reportReturnType]


def _torch_can(rows: Tensor, weight: Tensor) -> bool:
    """bf16 on CUDA from Ampere on, each row and column at a multiple of `ALIGNED_BYTES`."""
    if rows.device.type != "cuda" or rows.dtype != torch.bfloat16 or weight.dtype != rows.dtype:
        return False
    sizes = (*rows.shape[1:], *weight.shape[1:])
    is_aligned = all(size * rows.element_size() % ALIGNED_BYTES == 0 for size in sizes)
    addresses = (rows.data_ptr(), weight.data_ptr())
    is_aligned = is_aligned and all(address % ALIGNED_BYTES == 0 for address in addresses)
    return is_aligned and get_device_capability(rows.device.index or 0) >= (8, 0)


class _GroupedProduct(torch.autograd.Function):
    """Through our kernels where they run, else a loop over groups."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        return _product(rows, weight, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, weight, ends = ctx.saved_tensors
        (grad,) = gradients
        needs_rows, needs_weight, _ = ctx.needs_input_grad
        grad_rows = _product(grad, weight.transpose(1, 2), ends) if needs_rows else None
        grad_weight = None
        if needs_weight and weight.stride(1) == 1:  # keep the layout that the parameter has
            grad_weight = _outer(grad, rows, ends, weight.dtype).transpose(1, 2)
        elif needs_weight:
            grad_weight = _outer(rows, grad, ends, weight.dtype)
        return grad_rows, grad_weight, None


def _product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if can_run_triton(rows.device):
        from verl.models.kernels import grouped  # noqa: PLC0415 - needs triton

        return grouped.grouped_product(rows, weight, ends)
    return reference_product(rows, weight, ends)


def reference_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    output, start = rows.new_zeros(len(rows), weight.shape[2]), 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(rows[start:end], weight[expert], out=output[start:end])
        start = end
    return output


def _outer(left: Tensor, right: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    if can_run_triton(left.device):
        from verl.models.kernels import grouped  # noqa: PLC0415 - needs triton

        return grouped.grouped_outer(left, right, ends, dtype)
    return reference_outer(left, right, ends, dtype)


def reference_outer(left: Tensor, right: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    sums = left.new_zeros(len(ends), left.shape[1], right.shape[1], dtype=dtype)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            sums[expert] = left[start:end].t() @ right[start:end]
        start = end
    return sums


# ---- from tokens to rows and back ----------------------------------------------------------------


class _TakeRows(torch.autograd.Function):
    """hidden[tokens]; the gradient of a token is the sum over its rows, in the order of routes."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        return hidden.index_select(0, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (positions,) = ctx.saved_tensors
        return sum_rows(gradients[0], None, positions), None, None


class _SumRows(torch.autograd.Function):
    """For each token the sum of its rows times their weights."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, positions)
        return sum_rows(rows, weights, positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, weights, positions = ctx.saved_tensors
        (grad,) = gradients
        if can_run_triton(rows.device):
            from verl.models.kernels.grouped import sum_rows_backward  # noqa: PLC0415 - needs triton

            return *sum_rows_backward(grad, rows, weights, positions), None
        pulled = grad[:, None].float()  # (N, 1, hidden)
        grad_rows = torch.zeros_like(rows)
        grad_rows[positions.flatten()] = (pulled * weights[..., None]).flatten(0, 1).to(rows.dtype)
        return grad_rows, (pulled * rows[positions].float()).sum(-1).to(weights.dtype), None


def sum_rows(rows: Tensor, weights: Tensor | None, positions: Tensor) -> Tensor:
    """(N, width): over j the sum of weights[n, j] rows[positions[n, j]], in fp32."""
    if can_run_triton(rows.device):
        from verl.models.kernels import grouped  # noqa: PLC0415 - needs triton

        return grouped.sum_rows(rows, weights, positions)
    return reference_sum_rows(rows, weights, positions)


def reference_sum_rows(rows: Tensor, weights: Tensor | None, positions: Tensor) -> Tensor:
    total = rows.new_zeros(
        len(positions), rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32)
    )
    for j in range(positions.shape[1]):
        row = rows[positions[:, j]].to(total.dtype)
        total += row if weights is None else row * weights[:, j, None].to(total.dtype)
    return total.to(rows.dtype)


# ---- experts on several ranks --------------------------------------------------------------------


class ExpertGroup:
    """Ranks that each hold an equal, consecutive share of the experts of every layer."""

    def __init__(self, group: dist.ProcessGroup, compute_dtype: torch.dtype) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.compute_dtype = compute_dtype
        self.device = collective_device(group)

    def local(self, weight: DTensor) -> Tensor:
        """This rank's experts as they compute."""
        return weight.to_local().to(self.device, self.compute_dtype)

    def own_experts(self, factor: Tensor) -> Tensor:
        """This rank's of a factor (E, ...) that every rank has; ranks sum its gradient."""
        return factor.chunk(self.size)[dist.get_rank(self.group)]

    def run(self, module: nn.Module, rows: Tensor, ends: Tensor, *, is_exact: bool) -> Tensor:
        """As `expert_outputs`, for rows of all experts; all ranks call it together."""
        counts = ends.diff(prepend=ends.new_zeros(1)).view(self.size, -1).long()  # (ranks, local)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts.contiguous(), group=self.group)
        sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
        rows = _Exchange.apply(rows, sent, received, self.group)  # by rank, then by expert
        num_local = arriving.shape[1]
        experts = torch.arange(num_local, device=rows.device).repeat(self.size)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        experts = experts.repeat_interleave(arriving.flatten())
        order = experts.argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        local_ends = arriving.sum(0).cumsum(0).int()
        outputs = expert_outputs(module, rows[order], local_ends, is_exact=is_exact)[back]  # pyright: ignore[reportOptionalSubscript, reportIndexIssue]
        return _Exchange.apply(outputs, received, sent, self.group)  # pyright: ignore[reportReturnType]


class _Exchange(torch.autograd.Function):
    """Send consecutive rows to the ranks of a group; gradients travel back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.splits = sent, received, group
        output = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sent, received, group = ctx.splits
        grad = gradients[0].new_empty(sum(sent), gradients[0].shape[1])
        dist.all_to_all_single(grad, gradients[0].contiguous(), sent, received, group=group)
        return grad, None, None, None
