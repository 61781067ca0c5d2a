"""The same number for the same token, however it is computed.

Floating-point sums depend on their order, and kernels choose the order by the shape of the whole
product: a token decoded beside three others differs in the last bits from the same token in a
training pass. Here every product has one fixed shape. Rows go through linear layers in tiles of
`ROWS`; queries meet keys in tiles of `QUERIES`, always against the full capacity of keys. Rollout
and training then agree bit for bit. The number of tokens is padded to a multiple of `ROWS` too,
because the last elements of an odd-sized tensor go through other code than the rest. It is slower,
and meant for proof.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.models.attention import AttentionLayout, AttentionOptions

ROWS = 64
QUERIES = 16

_capacities: "WeakKeyDictionary[nn.Module, int]" = WeakKeyDictionary()


def make_exact(model: PreTrainedModel, capacity: int) -> PreTrainedModel:
    """Route every linear layer of the model through fixed tiles, in place.

    `capacity` is the longest sequence there will be, prompt and response together.
    """
    odd = [name for name, p in model.named_parameters() if p.dim() > 2]
    if odd:
        raise ValueError(
            f"exact mode covers linear layers; {type(model).__name__} also has {odd[0]} "
            f"of {dict(model.named_parameters())[odd[0]].dim()} dimensions: turn exact mode off"
        )
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = _TiledForward(module)
    _capacities[model] = capacity
    return model


def exact_capacity(model: nn.Module) -> int | None:
    """The capacity `make_exact` was given; None for a model that is not exact."""
    return _capacities.get(model)


class _TiledForward:
    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    def __call__(self, input: Tensor) -> Tensor:
        return exact_linear(input, self.module.weight, self.module.bias)


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
            k, v = (F.pad(x, (0, 0, 0, 0, 0, self.capacity - len(x))) for x in (k, v))
            for start in range(0, len(q), QUERIES):
                tile = q[start : start + QUERIES]
                outputs.append(exact_attention(tile, k, v, start, options))
        outputs.append(torch.zeros_like(query[num_tokens:]))  # padding of the pass
        return torch.cat(outputs)


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, first_position: int, options: AttentionOptions
) -> Tensor:
    """Queries (n <= QUERIES, heads, D) at consecutive positions against keys (capacity, KV, D)."""
    num_queries, kv_heads = len(q), k.shape[1]
    q = F.pad(q, (0, 0, 0, 0, 0, QUERIES - num_queries))
    q = q.unflatten(1, (kv_heads, -1)).permute(1, 0, 2, 3).flatten(1, 2)  # (KV, QUERIES * h, D)
    k, v = (x.transpose(0, 1).contiguous() for x in (k, v))  # (KV, capacity, D)
    scores = torch.bmm(q.contiguous(), k.transpose(1, 2)) * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    position = torch.arange(first_position, first_position + QUERIES).clamp_max(k.shape[1] - 1)
    distance = position[:, None] - torch.arange(k.shape[1])
    visible = distance >= 0
    if options.sliding_window is not None:
        visible &= distance < options.sliding_window
    heads_per_kv = scores.shape[1] // QUERIES
    scores = scores.masked_fill(~visible.repeat_interleave(heads_per_kv, 0), -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.view(kv_heads, 1, heads_per_kv).expand(-1, QUERIES, -1)
        scores = torch.cat([scores, sinks.reshape(kv_heads, -1, 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    output = torch.bmm(weights.contiguous(), v)  # (KV, QUERIES * h, D)
    output = output.unflatten(1, (QUERIES, -1)).permute(1, 0, 2, 3).flatten(1, 2)
    return output[:num_queries]
