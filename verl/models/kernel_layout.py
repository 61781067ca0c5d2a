"""Packed attention through our kernel, with torch's own backward pass where that fits.

The forward pass gives each token the bits that decoding gives it. The backward pass goes through
flash attention twice where prompts are shared: samples over their own tokens, and all samples of a
prompt over the prompt. Both get the output and the log-sum-exp over all keys, so that their weights
are those of one softmax and the gradients add up. What flash attention does not know (soft caps,
sinks, fp32, windows over shared prompts) is differentiated through the plain formula.
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
from verl.models.packed import PackedLayout
from verl.models.shared_prompts import SharedPrompts, UnfoldedLayout
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
            own = [*parts.prompts, *parts.samples]
            self._prompt_starts = starts_of(parts.prompts, device)
            self._answer_starts = starts_of(parts.tokens_per_prompt(), device)
        else:
            self.num_tokens, self.longest = sum(parts), max(parts, default=0)
            own = list(parts)
        self._longest_own = max(own, default=0)
        self._own_starts = starts_of(own, device)

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
            self._tiles_for(tokens_per_tile(query.shape[1], key.shape[1])),
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
        """Gradients for query, key and value by flash attention."""
        window = -1 if options.sliding_window is None else options.sliding_window - 1
        rows = (gradient, query, key, value, output, log_sum)
        grads = flash_backward(
            *rows,
            (self._own_starts, self._longest_own),
            (self._own_starts, self._longest_own),
            scaling=options.scaling,
            is_causal=True,
            window=window,
        )
        if isinstance(self.parts, SharedPrompts):
            self._add_prompt_part(grads, rows, options, self.parts)
        return grads

    def _add_prompt_part(
        self,
        grads: tuple[Tensor, Tensor, Tensor],
        rows: tuple[Tensor, ...],
        options: AttentionOptions,
        parts: SharedPrompts,
    ) -> None:
        """What samples owe to their prompts: every sample sees all of its prompt."""
        prompts = slice(0, parts.num_prompt_tokens)
        samples = slice(parts.num_prompt_tokens, parts.num_tokens)
        gradient, query, key, value, output, log_sum = rows
        extra = flash_backward(
            gradient[samples],
            query[samples],
            key[prompts],
            value[prompts],
            output[samples],
            log_sum[:, samples].contiguous(),
            (self._answer_starts, max(parts.tokens_per_prompt())),
            (self._prompt_starts, max(parts.prompts)),
            scaling=options.scaling,
            is_causal=False,
            window=-1,
        )
        for grad, part, place in zip(grads, extra, (samples, prompts, prompts), strict=True):
            grad[place] += part

    def takes_flash(self, query: Tensor, value: Tensor, options: AttentionOptions) -> bool:
        is_plain = options.softcap is None and options.sinks is None
        width = query.shape[-1]
        fits = width == value.shape[-1] and width <= LARGEST_FLASH_HEAD and width % 8 == 0
        is_windowed = options.sliding_window is not None and isinstance(self.parts, SharedPrompts)
        is_cuda = query.device.type == "cuda"
        return is_cuda and is_plain and fits and query.dtype in FLASH_DTYPES and not is_windowed

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
        if layout.takes_flash(query, value, options):
            num_tokens = len(query)
            real = slice(0, layout.num_tokens)
            rows = (x[real] for x in (gradient, query, key, value, output))
            sums = log_sum[:, real].contiguous()
            grads = layout.backward(*rows, sums, options)
            return *(padded(grad, num_tokens) for grad in grads), None, None, None, None
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        own_sinks = None if sinks is None else sinks.detach().requires_grad_()
        with torch.enable_grad():
            real = (x[: layout.num_tokens] for x in leaves)
            options = replace(options, sinks=own_sinks)
            result = layout.reference().attend(ctx.layer, *real, options)
        inputs = leaves if own_sinks is None else [*leaves, own_sinks]
        found = torch.autograd.grad(result, inputs, gradient[: layout.num_tokens])
        return *found[:3], found[3] if own_sinks is not None else None, None, None, None


def flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    queries: tuple[Tensor, int],
    keys: tuple[Tensor, int],
    *,
    scaling: float,
    is_causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """torch's flash attention, backward; `queries` and `keys` are (where sequences start, longest).

    Output and log-sum-exp (heads, N) may come from a softmax over more keys than these.
    """
    unused = torch.empty(0, dtype=torch.long, device=query.device)  # random numbers of dropout
    return torch.ops.aten._flash_attention_backward(
        gradient, query, key, value, output, log_sum,
        queries[0], keys[0], queries[1], keys[1], 0.0, is_causal, unused, unused,
        scale=scaling, window_size_left=window, window_size_right=0 if is_causal else -1,
    )  # fmt: skip


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


def starts_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Where each sequence starts, and where the last ends; int32."""
    return without_waiting(torch.tensor([0, *lengths]).cumsum(0).int(), device)


def padded(x: Tensor, num_rows: int) -> Tensor:
    return F.pad(x, (0, 0, 0, 0, 0, num_rows - len(x))) if len(x) < num_rows else x
