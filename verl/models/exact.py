"""The same number for the same token, however it is computed.

Floating-point sums depend on their order, and kernels choose the order by the shape of the whole
product: a token decoded beside three others differs in the last bits from the same token in a
training pass.

On a GPU our kernels add in one order for every shape (`attention_blocks`), so only the matrix
products remain: cuBLAS splits long sums for few rows, and is told not to. That costs next to
nothing.

Elsewhere every product has one fixed shape. Rows go through linear layers in tiles of `ROWS`;
queries meet keys in tiles of `QUERIES`, always against the full capacity of keys. The number of
tokens is padded to a multiple of `ROWS` too, because the last elements of an odd-sized tensor go
through other code than the rest. It is slower, and meant for proof.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.models.attention import AttentionLayout, AttentionOptions
from verl.models.kernels.availability import can_run_triton
from verl.models.routing import RoutedForward, Routing, routers
from verl.models.vision import vision_parts

ROWS = 64
QUERIES = 16

_capacities: "WeakKeyDictionary[nn.Module, int]" = WeakKeyDictionary()
_exact: "WeakSet[nn.Module]" = WeakSet()


def make_exact(model: PreTrainedModel, capacity: int) -> PreTrainedModel:
    """Let the model give each token the same bits in rollout and training, in place.

    `capacity` is the longest sequence there will be, prompt and response together. On a GPU this
    holds for the whole process from now on.
    """
    vision = {id(module) for part in vision_parts(model) for module in part.modules()}
    routing = Routing.of(model)
    refuse_other_weights(model)
    _exact.add(model)
    for layer in () if routing is None else routing.layers:
        layer.is_exact = True
    if model.device.type == "cuda" and can_run_triton(model.device):
        never_split_sums()
        return model
    for module in model.modules():
        # A vision tower runs one image at a time, with the same shapes in rollout and training.
        if isinstance(module, nn.Linear) and id(module) not in vision:
            module.forward = _TiledForward(module)
        elif isinstance(module.forward, RoutedForward):
            for router in routers(module):
                router.forward = _TiledRouter(router)
    _capacities[model] = capacity
    return model


def refuse_other_weights(model: PreTrainedModel) -> None:
    """Exact are linear layers, the experts of transformers' own layers, and vision towers, which
    run one image at a time."""
    covered = {id(p) for m in model.modules() if "routing" in vars(m) for p in m.parameters()}
    covered |= {id(p) for part in vision_parts(model) for p in part.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.dim() > 2 and id(parameter) not in covered:
            raise ValueError(
                f"exact mode covers linear layers and experts; {type(model).__name__} also has "
                f"{name} of {parameter.dim()} dimensions: turn exact mode off"
            )


def never_split_sums() -> None:
    """Products of 16-bit matrices add in one order, however many rows there are (8 at least)."""
    torch.backends.cuda.preferred_blas_library("cublaslt")  # the other one cannot promise it
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


def exact_capacity(model: nn.Module) -> int | None:
    """The capacity of a model that runs in tiles; None for any other."""
    return _capacities.get(model)


def is_exact(model: nn.Module) -> bool:
    return model in _exact


class _TiledForward:
    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    def __call__(self, input: Tensor) -> Tensor:
        return exact_linear(input, self.module.weight, self.module.bias)


class _TiledRouter:
    """A router's own forward, which treats tokens one by one, in tiles of `ROWS` tokens."""

    def __init__(self, module: nn.Module) -> None:
        self.own_forward = module.forward

    def __call__(self, hidden: Tensor) -> Any:
        rows = hidden.flatten(0, -2)
        padded = F.pad(rows, (0, 0, 0, -len(rows) % ROWS))
        parts = [self.own_forward(tile) for tile in padded.split(ROWS)]
        if isinstance(parts[0], Tensor):
            return torch.cat(parts)[: len(rows)]
        return tuple(torch.cat(columns)[: len(rows)] for columns in zip(*parts, strict=True))


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` in tiles of `ROWS` rows; the backward pass is the ordinary one."""
    output = _TiledLinear.apply(x.flatten(0, -2), weight)
    output = output if bias is None else output + bias
    return output.unflatten(0, x.shape[:-1])  # pyright: ignore[reportAttributeAccessIssue]


class _TiledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        padded = F.pad(x, (0, 0, 0, -len(x) % ROWS))
        return torch.cat([F.linear(tile, weight) for tile in padded.split(ROWS)])[: len(x)]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ x


class ExactPackedLayout(AttentionLayout):
    """Packed sequences whose attention has one shape; `capacity` must be the rollout engine's."""

    def __init__(self, lengths: Sequence[int], capacity: int) -> None:
        if max(lengths, default=0) > capacity:
            raise ValueError(
                f"a sequence of {max(lengths)} tokens is longer than the exact capacity {capacity}"
            )
        self.lengths = list(lengths)
        self.capacity = capacity

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        outputs, num_tokens = [], sum(self.lengths)
        parts = (x[:num_tokens].split(self.lengths) for x in (query, key, value))
        for q, k, v in zip(*parts, strict=True):
            outputs.append(exact_sequence_attention(q, k, v, self.capacity, options))
        num_missing = len(query) - num_tokens  # padding of the pass
        outputs.append(query.new_zeros(num_missing, query.shape[1], value.shape[2]))
        return torch.cat(outputs)


def exact_sequence_attention(
    q: Tensor, k: Tensor, v: Tensor, capacity: int, options: AttentionOptions
) -> Tensor:
    """Queries (n, H, D) of the last n of the tokens whose keys and values (L, KV, D) are given."""
    positions = torch.arange(len(k) - len(q), len(k), device=k.device)
    k, v = (F.pad(x.transpose(0, 1), (0, 0, 0, capacity - len(x)))[None] for x in (k, v))
    tiles = [
        exact_attention(tile[None], k, v, tile_positions[None], options)[0]
        for tile, tile_positions in zip(q.split(QUERIES), positions.split(QUERIES), strict=True)
    ]
    return torch.cat(tiles)


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, options: AttentionOptions
) -> Tensor:
    """One tile of each of B sequences: queries (B, n <= QUERIES, H, D) at `positions` (B, n).

    Keys and values are (B, KV, capacity, D). What lies behind a query's position is not seen, but
    it must be finite.
    """
    num_queries, (kv_heads, capacity) = q.shape[1], k.shape[1:3]
    q = F.pad(q, (0, 0, 0, 0, 0, QUERIES - num_queries)).unflatten(2, (kv_heads, -1))
    q = q.transpose(1, 2)  # (B, KV, QUERIES, h, D)
    scores = _multiply(q, k.transpose(-1, -2)) * options.scaling  # (B, KV, QUERIES, h, capacity)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    positions = F.pad(positions, (0, QUERIES - num_queries))
    distance = positions[:, :, None] - torch.arange(capacity, device=k.device)
    is_hidden = distance < 0
    if options.sliding_window is not None:
        is_hidden |= distance >= options.sliding_window
    scores = scores.masked_fill(is_hidden[:, None, :, None], -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.view(1, kv_heads, 1, -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., :capacity]
    output = _multiply(weights, v)  # (B, KV, QUERIES, h, D)
    return output.transpose(1, 2).flatten(2, 3)[:, :num_queries]


def _multiply(rows: Tensor, matrices: Tensor) -> Tensor:
    """(B, KV, QUERIES, h, n) times (B, KV, n, m); every product has the same shape."""
    product = torch.bmm(rows.flatten(2, 3).flatten(0, 1).contiguous(), matrices.flatten(0, 1))
    return product.view(*rows.shape[:-1], matrices.shape[-1])
