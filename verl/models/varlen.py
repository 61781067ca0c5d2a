"""Packed attention by torch's own variable-length kernel, where device and model allow it."""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from verl.models.attention import AttentionLayout, AttentionOptions
from verl.models.packed import PackedLayout

GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
)
"""torch 2.11 takes fewer key heads than query heads as they come; later ones want to be told."""

DTYPES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256


class VarlenLayout(AttentionLayout):
    """Sequences end to end; `lengths` are tokens per sequence. Tokens after them are padding.

    Soft caps, sinks, other number formats and very wide heads take the reference's path.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.num_tokens = sum(lengths)
        self._longest = max(lengths, default=0)
        self._starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        self._lengths = list(lengths)
        self._reference: PackedLayout | None = None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        num_padding = len(query) - self.num_tokens
        query, key, value = (x[: self.num_tokens] for x in (query, key, value))
        output = self._attend(layer, query, key, value, options)
        return F.pad(output, (0, 0, 0, 0, 0, num_padding)) if num_padding else output

    def _attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        is_plain = options.softcap is None and options.sinks is None
        width = max(query.shape[-1], value.shape[-1])
        is_same_width = query.shape[-1] == value.shape[-1]
        if not (is_plain and query.dtype in DTYPES and width <= LARGEST_HEAD and is_same_width):
            return self._by_reference(layer, query, key, value, options)
        window = -1 if options.sliding_window is None else options.sliding_window - 1
        output = varlen_attn(
            query, key, value, self._starts, self._starts, self._longest, self._longest,
            window_size=(window, 0), scale=options.scaling, **GROUPED,
        )  # fmt: skip
        assert isinstance(output, Tensor)
        return output

    def _by_reference(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        if self._reference is None:
            self._reference = PackedLayout(self._lengths, query.device)
        return self._reference.attend(layer, query, key, value, options)
