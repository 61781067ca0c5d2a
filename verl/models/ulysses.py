"""Ulysses sequence parallelism: tokens sharded across ranks, heads in attention (arXiv:2309.14509).

    rank 0   tokens 0 .. n-1    all heads  ┐              ┌  all tokens   heads 0 .. h-1
                                           ├─ all-to-all ─┤                                 attend
    rank 1   tokens n .. 2n-1   all heads  ┘              └  all tokens   heads h .. 2h-1

Embedding, norms, linear layers and output head see a rank's own tokens only; attention sees whole
sequences for a shard of the heads, and another all-to-all returns the output to the tokens.

Every rank of the group holds the same rows, gathers the values of all ranks and computes the same
loss. Gathering passes back to a rank the gradient of its own values and of no others, so the
loss counts once, and the gradient of a parameter is the sum over the ranks, whatever each computed.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from verl.models.attention import (
    AttentionLayout,
    AttentionOptions,
    heads_per_rank,
    key_head_repeats,
)
from verl.models.exact import exact_capacity

OPTION = "ulysses_sequence_parallel_size"
ROPE_BY_LONGEST = {"dynamic", "longrope"}
"""Rotary embeddings that change with the longest sequence of a pass, which no rank sees alone."""


class SequenceShard:
    """This rank's shard of the tokens of a pass, all of which every rank of `group` holds.

    `sources` (R,) are the tokens whose hidden states are read.
    """

    def __init__(self, num_tokens: int, sources: Tensor, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_tokens = num_tokens
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.tokens_per_rank = max(1, -(-num_tokens // self.num_ranks))
        owners = sources // self.tokens_per_rank
        self._order = owners.argsort(stable=True)  # (R,) the sources of rank 0, of rank 1, ...
        self._counts = owners.bincount(minlength=self.num_ranks).tolist()
        self.rows = self._order.split(self._counts)[self.rank]
        """(r,) which of the R sources are this rank's."""
        self.sources = sources[self.rows] - self.rank * self.tokens_per_rank
        """(r,) where they are among this rank's tokens."""

    def select(self, tokens: Tensor) -> Tensor:
        """This rank's (n,) of the (N,) tokens, zero-padded at the end."""
        missing = self.tokens_per_rank * self.num_ranks - len(tokens)
        padding = tokens.new_zeros(missing, *tokens.shape[1:])
        return torch.cat([tokens, padding]).split(self.tokens_per_rank)[self.rank]

    def gather(self, values: Tensor) -> Tensor:
        """(R,) for the (r,) values of this rank's sources; the same on every rank."""
        gathered = _Gather.apply(values, self._counts, self.rank, self.group)
        assert isinstance(gathered, Tensor)
        return torch.empty_like(gathered).index_copy(0, self._order, gathered)


class UlyssesLayout(AttentionLayout):
    """Attention of the tokens of one rank; `inner` is the layout of all of them."""

    def __init__(self, inner: AttentionLayout, shard: SequenceShard) -> None:
        self.inner = inner
        self.shard = shard

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        num_ranks, num_tokens = self.shard.num_ranks, self.shard.num_tokens
        heads = heads_per_rank(query.shape[1], num_ranks, OPTION)
        repeats = key_head_repeats(key.shape[1], num_ranks)
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        query, key, value = (x[:num_tokens] for x in self._by_heads(query, key, value))
        output = self.inner.attend(layer, query, key, value, self._own_sinks(options, heads))
        missing = num_ranks * self.shard.tokens_per_rank - num_tokens
        return self._by_tokens(F.pad(output, (0, 0, 0, 0, 0, missing)))

    def _by_heads(self, *tensors: Tensor) -> list[Tensor]:
        """Each (n, heads, D), all heads of some tokens, to (N, heads / ranks, D)."""
        by_rank = [x.unflatten(1, (self.shard.num_ranks, -1)) for x in tensors]  # (n, ranks, h, D)
        packed = torch.cat([x.flatten(2).transpose(0, 1) for x in by_rank], dim=-1)
        packed = self._exchange(packed).flatten(0, 1)  # (N, all of this rank's numbers)
        parts = packed.split([x.shape[2] * x.shape[3] for x in by_rank], dim=-1)
        return [
            part.unflatten(1, tuple(x.shape[2:])) for part, x in zip(parts, by_rank, strict=True)
        ]

    def _by_tokens(self, x: Tensor) -> Tensor:
        """(N, heads / ranks, D) to (n, heads, D)."""
        return (
            self._exchange(x.unflatten(0, (self.shard.num_ranks, -1))).transpose(0, 1).flatten(1, 2)
        )

    def _exchange(self, x: Tensor) -> Tensor:
        received = _AllToAll.apply(x, self.shard.group)
        assert isinstance(received, Tensor)
        return received

    def _own_sinks(self, options: AttentionOptions, heads: int) -> AttentionOptions:
        if options.sinks is None:
            return options
        return replace(options, sinks=options.sinks.split(heads)[self.shard.rank])


def refuse_unshardable(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Raise for models whose results change when tokens are sharded across ranks."""
    config = model.config.get_text_config()
    heads_per_rank(config.num_attention_heads, dist.get_world_size(group), OPTION)
    if exact_capacity(model) is not None:
        raise ValueError(
            f"an exact model computes every product in one shape and cannot be sharded: set "
            f"{OPTION}=1 or turn exact mode off"
        )
    if (fault := rope_fault(config)) is not None:
        raise ValueError(fault)


def rope_fault(config: PreTrainedConfig) -> str | None:
    """What is wrong with rotary embeddings where ranks see parts of a sequence."""
    kinds = ROPE_BY_LONGEST & _rope_types(config.to_dict().get("rope_parameters") or {})
    if not kinds:
        return None
    return (
        f"the model ({config.model_type}) has {min(kinds)!r} rotary embeddings, which depend on "
        f"the longest sequence of a pass; ranks that see parts of it would disagree: set {OPTION}=1"
    )


def _rope_types(parameters: dict[str, Any]) -> set[str]:
    """RoPE types of all layers: parameters are one set, or one set per kind of layer."""
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(entry["rope_type"]) for entry in sets if "rope_type" in entry}


class _AllToAll(torch.autograd.Function):
    """x[i] goes to rank i; the result's [j] came from rank j. Its own inverse, and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(gradients[0], ctx.group), None  # pyright: ignore[reportReturnType]


class _Gather(torch.autograd.Function):
    """Values of all ranks end to end; a rank gets back the gradient of its own."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, counts: list[int], rank: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.counts, ctx.rank = counts, rank
        rows = (0, max(counts) - len(values))  # F.pad counts dimensions from the last one
        padded = F.pad(values, (*(0, 0) * (values.dim() - 1), *rows))
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].split(ctx.counts)[ctx.rank], None, None, None
