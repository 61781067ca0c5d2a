"""Attention over sequences laid end to end, without padding between them. Plain torch.

Sequences of similar length are gathered into small right-padded blocks; padding on the right of a
causal block is never seen by a real token, so no mask is needed, and the results are scattered
back. This is the reference that faster kernels are compared with, and the path on a CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.models.attention import AttentionLayout, AttentionOptions

MAX_PADDED_SHARE = 0.2

Masks = dict[tuple[int, int], Tensor]
"""Attention masks by (length of the block, size of the window)."""


class PackedLayout(AttentionLayout):
    """Layout of packed sequences; `lengths` are tokens per sequence, in order."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.lengths = list(lengths)
        self.num_tokens = sum(self.lengths)
        self.blocks = [
            _Block.build(self.lengths, members, torch.device(device))
            for members in similar_lengths(self.lengths)
        ]
        # Shared by the layers of a pass and freed with it: every pass has other lengths, and a mask
        # of 8,192 tokens takes 64 MiB.
        self._masks: Masks = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        del layer  # nothing is kept between layers
        outputs, indices = [], []
        for block in self.blocks:
            q, k, v = (block.gather(x) for x in (query, key, value))
            output = block_attention(q, k, v, options, self._masks)
            outputs.append(output.transpose(1, 2).flatten(0, 1)[block.real])  # (real tokens, H, D)
            indices.append(block.tokens[block.real])
        merged = torch.cat(outputs)
        return torch.empty_like(merged).index_copy(0, torch.cat(indices), merged)


@dataclass(frozen=True)
class _Block:
    tokens: Tensor
    """(rows * width,) token index of each entry; padding repeats the sequence's last token."""

    real: Tensor
    """(rows * width,) False where the entry is padding."""

    rows: int

    @classmethod
    def build(cls, lengths: list[int], members: list[int], device: torch.device) -> "_Block":
        starts = torch.tensor([0, *lengths]).cumsum(0)[members][:, None]  # (rows, 1)
        size = torch.tensor([lengths[i] for i in members])[:, None]
        column = torch.arange(int(size.max()))[None, :]
        tokens = starts + torch.minimum(column, size - 1)
        real = column < size
        return cls(tokens.flatten().to(device), real.flatten().to(device), len(members))

    def gather(self, x: Tensor) -> Tensor:
        """(N, heads, D) to (rows, heads, width, D)."""
        return x.index_select(0, self.tokens).unflatten(0, (self.rows, -1)).transpose(1, 2)


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Split the sequences into groups that waste at most `MAX_PADDED_SHARE` on padding."""
    groups: list[list[int]] = []
    total = 0
    for index in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and total + lengths[index] >= (1 - MAX_PADDED_SHARE) * longest * (
            len(groups[-1]) + 1
        ):
            groups[-1].append(index)
            total += lengths[index]
        else:
            groups.append([index])
            total = lengths[index]
    return groups


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, masks: Masks | None = None
) -> Tensor:
    """Causal attention in a right-padded block; q is (B, H, L, D), k and v (B, KV, L, D).

    `masks` caches masks between calls.
    """
    length = q.shape[2]
    num_seen = min(options.sliding_window or length, length)
    is_plain = options.softcap is None and options.sinks is None
    if is_plain and num_seen == length:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=options.scaling, enable_gqa=True
        )
    masks = {} if masks is None else masks
    if (length, num_seen) not in masks:
        masks[length, num_seen] = window_mask(length, num_seen, q.device)
    mask = masks[length, num_seen]
    if is_plain:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=options.scaling, enable_gqa=True)
    return explicit_attention(q, k, v, mask, options)


def explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, options: AttentionOptions
) -> Tensor:
    """Attention with a soft cap or sinks, written out; `visible` broadcasts to (B, H, Lq, Lk)."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = torch.where(visible, scores, -torch.inf)  # keeps the mask itself for backward, no copy
    if options.sinks is not None:
        sinks = options.sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = scores.float().softmax(-1).to(v.dtype)
    return weights[..., : v.shape[2]] @ v


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """(length, length), True where the row's token sees the column's."""
    every = torch.ones(length, length, dtype=torch.bool, device=device)
    return every.tril_().triu_(1 - window)
