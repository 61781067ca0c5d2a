"""Packed attention through our kernels, with torch's own backward pass where that fits better.

The forward pass equals decoding bit for bit. The backward pass is a kernel of ours for plain
attention in 16-bit formats, and torch's flash attention for windows and wide heads, which does not
support shared prompts. What neither supports (soft caps, sinks, fp32, windows over shared prompts)
is differentiated through the plain formula.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.models.attention import AttentionLayout, AttentionOptions
from verl.models.kernels.packed_attention import (
    Continuation,
    Tiles,
    packed_attention,
    tokens_per_tile,
)
from verl.models.kernels.packed_attention_backward import (
    WIDEST_HEAD,
    KeySpan,
    KeyTiles,
    packed_attention_backward,
)
from verl.models.packed import PackedLayout
from verl.models.shared_prompts import SharedPrompts, UnfoldedLayout, spans
from verl.utils.device import without_waiting

FLASH_DTYPES = (torch.bfloat16, torch.float16)
LARGEST_FLASH_HEAD = 256


class KernelLayout(AttentionLayout):
    """Whole sequences end to end, or prompts and their samples; tokens after them are padding."""

    def __init__(self, parts: Sequence[int] | SharedPrompts, device: torch.device) -> None:
        """`parts` are tokens per sequence, or shared prompts."""
        self.parts = parts if isinstance(parts, SharedPrompts) else list(parts)
        self.device = device
        self._tiles: dict[int, Tiles] = {}
        self._reference: AttentionLayout | None = None
        if isinstance(parts, SharedPrompts):
            self.num_tokens = parts.num_tokens
            self.longest = max(parts.whole_lengths(), default=0)
        else:
            self.num_tokens, self.longest = sum(parts), max(parts, default=0)
        self._key_tiles: KeyTiles | None = None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        if options.sliding_window is not None and options.sliding_window >= self.longest:
            options = replace(options, sliding_window=None)
        return _Attention.apply(  # pyright: ignore[reportReturnType]
            query, key, value, options.sinks, self, layer, options
        )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        return packed_attention(
            query,
            key,
            value,
            self._tiles_for(tokens_per_tile(query, key)),
            scaling=options.scaling,
            sliding_window=options.sliding_window,
            softcap=options.softcap,
            sinks=options.sinks,
        )

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients for query, key and value by our kernel."""
        if self._key_tiles is None:
            self._key_tiles = KeyTiles(key_spans(self.parts), self.device)
        return packed_attention_backward(
            gradient,
            query,
            key,
            value,
            output,
            log_sum,
            self._tiles_for(tokens_per_tile(query, key)),
            self._key_tiles,
            scaling=options.scaling,
        )

    def flash_backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients for query, key and value by flash attention, for whole sequences."""
        assert not isinstance(self.parts, SharedPrompts)
        num_tokens, real = len(query), slice(0, self.num_tokens)
        starts, longest = starts_of(self.parts, self.device), self.longest
        window = -1 if options.sliding_window is None else options.sliding_window - 1
        unused = torch.empty(0, dtype=torch.long, device=query.device)  # state of dropout
        grads = torch.ops.aten._flash_attention_backward(
            *(x[real] for x in (gradient, query, key, value, output)),
            log_sum[:, real].contiguous(),
            starts, starts, longest, longest, 0.0, True, unused, unused,
            scale=options.scaling, window_size_left=window, window_size_right=0,
        )  # fmt: skip
        grad_query, grad_key, grad_value = (padded(grad, num_tokens) for grad in grads)
        return grad_query, grad_key, grad_value

    def supports_kernel(self, query: Tensor, value: Tensor, options: AttentionOptions) -> bool:
        """Whether `backward` supports the options. Interpreted, it runs in fp32 as well."""
        is_plain = options.softcap is None and options.sinks is None
        is_windowed = options.sliding_window is not None
        width = query.shape[-1]
        fits = width == value.shape[-1] and width <= WIDEST_HEAD
        supports_dtype = query.dtype in FLASH_DTYPES or query.device.type == "cpu"
        return is_plain and not is_windowed and fits and supports_dtype

    def supports_flash(self, query: Tensor, value: Tensor, options: AttentionOptions) -> bool:
        is_plain = options.softcap is None and options.sinks is None
        width = query.shape[-1]
        fits = width == value.shape[-1] and width <= LARGEST_FLASH_HEAD and width % 8 == 0
        is_whole = not isinstance(self.parts, SharedPrompts)
        is_cuda = query.device.type == "cuda"
        return is_cuda and is_plain and fits and query.dtype in FLASH_DTYPES and is_whole

    def reference(self) -> AttentionLayout:
        if self._reference is None:
            parts = self.parts
            if isinstance(parts, SharedPrompts):
                inner = PackedLayout(parts.whole_lengths(), self.device)
                self._reference = UnfoldedLayout(parts, inner, self.device)
            else:
                self._reference = PackedLayout(parts, self.device)
        return self._reference

    def _tiles_for(self, num_tokens: int) -> Tiles:
        if num_tokens not in self._tiles:
            self._tiles[num_tokens] = Tiles(continuations(self.parts), num_tokens, self.device)
        return self._tiles[num_tokens]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        layout: KernelLayout,
        layer: int,
        options: AttentionOptions,
    ) -> Tensor:
        output, log_sum = layout.forward(query, key, value, options)
        ctx.save_for_backward(query, key, value, sinks, output, log_sum)
        ctx.layout, ctx.layer, ctx.options = layout, layer, options
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        layout, options, (gradient,) = ctx.layout, ctx.options, gradients
        for is_supported, backward in (
            (layout.supports_kernel, layout.backward),
            (layout.supports_flash, layout.flash_backward),
        ):
            if is_supported(query, value, options):
                grads = backward(gradient, query, key, value, output, log_sum, options)
                return *grads, None, None, None, None
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        sinks_leaf = None if sinks is None else sinks.detach().requires_grad_()
        with torch.enable_grad():
            real = (x[: layout.num_tokens] for x in leaves)
            options = replace(options, sinks=sinks_leaf)
            result = layout.reference().attend(ctx.layer, *real, options)
        inputs = leaves if sinks_leaf is None else [*leaves, sinks_leaf]
        grads = torch.autograd.grad(result, inputs, gradient[: layout.num_tokens])
        return *grads[:3], grads[3] if sinks_leaf is not None else None, None, None, None


def continuations(parts: list[int] | SharedPrompts) -> list[Continuation]:
    if isinstance(parts, SharedPrompts):
        prompts = parts.prompt_spans()
        samples = zip(parts.owners, parts.sample_spans(), strict=True)
        alone = [Continuation(start, length) for start, length in prompts]
        return alone + [Continuation(*span, *prompts[owner]) for owner, span in samples]
    starts = [0]
    for length in parts:
        starts.append(starts[-1] + length)
    return [Continuation(start, length) for start, length in zip(starts, parts, strict=False)]


def key_spans(parts: list[int] | SharedPrompts) -> list[KeySpan]:
    """Key span of each sequence, prompts first; a prompt's has the queries that attend to it."""
    if not isinstance(parts, SharedPrompts):
        return [KeySpan(c.start, c.start + c.length) for c in continuations(parts)]
    answers = spans(parts.tokens_per_prompt(), parts.num_prompt_tokens)
    prompts = [
        KeySpan(start, start + length, (first, first + count))
        for (start, length), (first, count) in zip(parts.prompt_spans(), answers, strict=True)
    ]
    return prompts + [KeySpan(start, start + length) for start, length in parts.sample_spans()]


def starts_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Cumulative sequence lengths from 0, int32."""
    return without_waiting(torch.tensor([0, *lengths]).cumsum(0).int(), device)


def padded(x: Tensor, num_rows: int) -> Tensor:
    """`x` with zero rows appended up to `num_rows`."""
    return F.pad(x, (0, 0, 0, 0, 0, num_rows - len(x))) if len(x) < num_rows else x
