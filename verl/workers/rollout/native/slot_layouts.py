"""Attention through kernels over slots that stay where they are; which row has which is a column.

`decode_attention` and `prefill_attention` hold the same in plain torch, which reads slices of the
cache and therefore keeps the occupied slots side by side.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verl.models.attention import AttentionLayout, AttentionOptions
from verl.models.kernels.decode_attention import SlotRows, slot_decode_attention
from verl.models.kernels.packed_attention import (
    Continuation,
    Tiles,
    packed_attention,
    tokens_per_tile,
)
from verl.models.kernels.row_steps import write_tokens
from verl.models.kernels.slot_prefill_attention import (
    SlotContinuation,
    SlotTiles,
    slot_prefill_attention,
)
from verl.workers.rollout.native.attention import PrefillSequence
from verl.workers.rollout.native.cache import KVCache
from verl.workers.rollout.native.pages import PAGE
from verl.workers.rollout.native.rows import RowTable, in_one_copy


class SlotDecodeLayout(AttentionLayout):
    """One new token for each row of the table; queries past those are padding and give zeros."""

    def __init__(self, cache: KVCache, table: RowTable, pages: Tensor | None = None) -> None:
        """`pages` (slots, blocks) tells which pages make up a slot, if they are cut into pages."""
        self.cache = cache
        self.num_rows = len(table.newest)
        self.rows = SlotRows(
            table.prompt_slot, table.slot, table.num_shared, table.slot_positions, pages
        )

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        num_padding = len(query) - self.num_rows
        output = slot_decode_attention(
            query[: self.num_rows],
            key[: self.num_rows],
            value[: self.num_rows],
            self.cache.prompt[layer],
            self.cache.response[layer],
            self.rows,
            scaling=options.scaling,
            sliding_window=options.sliding_window,
            softcap=options.softcap,
            sinks=options.sinks,
        )
        if not num_padding:
            return output
        return torch.nn.functional.pad(output, (0, 0, 0, 0, 0, num_padding))


class SlotPrefillLayout(AttentionLayout):
    """New tokens of some sequences end to end; keys and values go to their slots in two launches.

    Where an earlier turn has left tokens in the slots, new tokens see those before them there.
    Tokens after the sequences are padding. `pages` is the page table, if slots are cut into pages.
    """

    def __init__(
        self, cache: KVCache, sequences: Sequence[PrefillSequence], pages: Tensor | None = None
    ) -> None:
        self.cache = cache
        self._pages = pages
        self._sequences = sequences
        self._has_known = any(sequence.num_known for sequence in sequences)
        spans = (find(sequences) for find in (shared_spans, own_spans))
        columns = [torch.from_numpy(copied_tokens(copies)) for copies in spans]
        self._shared, self._own = map(SlotCopies, in_one_copy(columns, cache.shape.device))
        self._tiles: dict[int, Tiles] = {}
        self._slot_tiles: dict[int, SlotTiles] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        self._shared.write(self.cache.prompt[layer], key, value)
        self._own.write(self.cache.response[layer], key, value)
        size, device = tokens_per_tile(query, key), self.cache.shape.device
        if self._has_known:
            if size not in self._slot_tiles:
                where = slot_continuations(self._sequences)
                self._slot_tiles[size] = SlotTiles(where, size, device)
            tiles = self._slot_tiles[size]
            return attention_in_slots(self.cache, layer, query, tiles, options, self._pages)
        if size not in self._tiles:
            self._tiles[size] = Tiles(continuations(self._sequences), size, device)
        return attention_of_tiles(query, key, value, self._tiles[size], options)


def attention_of_tiles(
    query: Tensor, key: Tensor, value: Tensor, tiles: Tiles, options: AttentionOptions
) -> Tensor:
    """New tokens see those before them."""
    output, _ = packed_attention(
        query,
        key,
        value,
        tiles,
        scaling=options.scaling,
        sliding_window=options.sliding_window,
        softcap=options.softcap,
        sinks=options.sinks,
    )
    return output


def attention_in_slots(
    cache: KVCache,
    layer: int,
    query: Tensor,
    tiles: SlotTiles,
    options: AttentionOptions,
    pages: Tensor | None,
) -> Tensor:
    """New tokens, which are in the slots, see all that is there before them."""
    return slot_prefill_attention(
        query,
        cache.prompt[layer],
        cache.response[layer],
        tiles,
        pages=pages,
        scaling=options.scaling,
        sliding_window=options.sliding_window,
        softcap=options.softcap,
        sinks=options.sinks,
    )


def first_tokens(sequences: Sequence[PrefillSequence]) -> list[int]:
    """Index of the first new token of each sequence among those of all."""
    return [0, *itertools.accumulate(sequence.num_new for sequence in sequences)][:-1]


def continuations(sequences: Sequence[PrefillSequence]) -> list[Continuation]:
    starts = first_tokens(sequences)
    return [Continuation(start, s.num_new) for start, s in zip(starts, sequences, strict=True)]


def slot_continuations(sequences: Sequence[PrefillSequence]) -> list[SlotContinuation]:
    starts = first_tokens(sequences)
    return [
        SlotContinuation(start, s.num_new, s.num_known, s.num_shared, s.prompt_slot, s.slots[0])
        for start, s in zip(starts, sequences, strict=True)
    ]


class SlotCopies:
    """New token `token[i]` goes to `position[i]` of `slot[i]`."""

    def __init__(self, columns: Tensor) -> None:
        """What `copied_tokens` found, on the device."""
        self.token, self.slot, self.position = columns

    def write(self, store: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
        if len(self.token):
            write_tokens(store, key, value, self.token, self.slot, self.position)


def copied_tokens(spans: Sequence["Span"]) -> np.ndarray:
    """Tokens, slots and positions, (3, tokens of all spans)."""
    counts, tokens, slots, positions = np.array(spans, dtype=np.int64).reshape(-1, 4).T
    inside = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
    return np.stack(
        [tokens.repeat(counts) + inside, slots.repeat(counts), positions.repeat(counts) + inside]
    )


Span = tuple[int, int, int, int]
"""How many tokens, the first of them among all, the slot, and the position there of the first."""


def shared_spans(sequences: Sequence[PrefillSequence]) -> list[Span]:
    """New tokens that prompts share, of each sequence that fills its prompt's slot."""
    return [
        span
        for sequence, start in zip(sequences, first_tokens(sequences), strict=True)
        if sequence.fills_prompt and not sequence.pages
        for span in _spans(sequence, start, 0, sequence.num_shared, sequence.prompt_slot)
    ]


def own_spans(sequences: Sequence[PrefillSequence]) -> list[Span]:
    """New tokens that belong in the rows' own slots, once for each of them.

    Where slots are cut into pages, prompts have none of their own: this is then everything.
    """
    return [
        span
        for sequence, start in zip(sequences, first_tokens(sequences), strict=True)
        for slot, first, end in (_page_pieces if sequence.pages else _slot_pieces)(sequence)
        for span in _spans(sequence, start, first, end, slot)
    ]


_Piece = tuple[int, int, int]
"""A slot or page, and the first token of a sequence that belongs at its start, and the end."""


def _slot_pieces(sequence: PrefillSequence) -> list[_Piece]:
    first, end = sequence.num_shared, len(sequence.token_ids)
    return [(slot, first, end) for slot in sequence.slots] if first < end else []


def _page_pieces(sequence: PrefillSequence) -> list[_Piece]:
    """Shared tokens are written through the first row only: their pages are those of all rows."""
    assert sequence.num_shared % PAGE == 0, "a page holds shared tokens, or those of one row"
    end, pieces = len(sequence.token_ids), []
    for number, pages in enumerate(sequence.pages):
        first = 0 if number == 0 and sequence.fills_prompt else sequence.num_shared
        first = max(first, sequence.num_known - sequence.num_known % PAGE)
        for start in range(first, end, PAGE):
            pieces.append((pages[start // PAGE], start, min(start + PAGE, end)))
    return pieces


def _spans(sequence: PrefillSequence, start: int, first: int, end: int, slot: int) -> list[Span]:
    """The new ones among the tokens from `first` to `end` of a sequence, whose new tokens stand
    from `start` on."""
    first_new = max(first, sequence.num_known)
    if first_new >= end:
        return []
    return [(end - first_new, start + first_new - sequence.num_known, slot, first_new - first)]
