"""Attention through kernels over slots that stay where they are; which row has which is a column.

`decode_attention` and `prefill_attention` hold the same in plain torch, which reads slices of the
cache and therefore keeps the occupied slots side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """New tokens of some sequences end to end; keys and values go to their slots in a few copies.

    Those of tokens that are known already (an earlier turn) stand before the new ones, which see
    them like a shared prompt. Tokens after the sequences are padding.
    """

    def __init__(self, cache: KVCache, sequences: Sequence[PrefillSequence]) -> None:
        self.cache = cache
        self._known = [sequence.known.layers for sequence in sequences if sequence.num_known]
        self._token_spans = token_spans(sequences)
        spans = (find(sequences, self._token_spans) for find in (shared_spans, own_spans))
        columns = [torch.from_numpy(copied_tokens(copies)) for copies in spans]
        self._shared, self._own = map(SlotCopies, in_one_copy(columns, cache.shape.device))
        self._tiles: dict[int, Tiles] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        known = self._joined(layer)
        every = (key, value)
        if known is not None:
            every = tuple(torch.cat(pair) for pair in zip(known, every, strict=True))
        self._shared.write(self.cache.prompt[layer], *every)
        self._own.write(self.cache.response[layer], *every)
        tiles = self._tiles_for(tokens_per_tile(query, key))
        return attention_of_tiles(query, key, value, tiles, options, known)

    def _joined(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values of all known tokens end to end."""
        if not self._known:
            return None
        keys, values = zip(*(layers[layer] for layers in self._known), strict=True)
        return torch.cat(keys), torch.cat(values)

    def _tiles_for(self, num_tokens: int) -> Tiles:
        if num_tokens not in self._tiles:
            sequences = continuations(self._token_spans)
            self._tiles[num_tokens] = Tiles(sequences, num_tokens, self.cache.shape.device)
        return self._tiles[num_tokens]


def attention_of_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: Tiles,
    options: AttentionOptions,
    known: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """New tokens see those before them, and `known` keys and values where their tile says so."""
    output, _ = packed_attention(
        query,
        key,
        value,
        tiles,
        shared=known,
        scaling=options.scaling,
        sliding_window=options.sliding_window,
        softcap=options.softcap,
        sinks=options.sinks,
    )
    return output


@dataclass(frozen=True)
class TokenSpans:
    """Spans of one sequence: among all known tokens, and among all new tokens."""

    first_known: int
    num_known: int
    first_new: int
    num_new: int


def token_spans(sequences: Sequence[PrefillSequence]) -> list[TokenSpans]:
    spans, known, new = [], 0, 0
    for sequence in sequences:
        spans.append(TokenSpans(known, sequence.num_known, new, sequence.num_new))
        known += sequence.num_known
        new += sequence.num_new
    return spans


def continuations(where: Sequence[TokenSpans]) -> list[Continuation]:
    return [Continuation(p.first_new, p.num_new, p.first_known, p.num_known) for p in where]


class SlotCopies:
    """Token `token[i]` of all, known and new, goes to `position[i]` of `slot[i]`."""

    def __init__(self, columns: Tensor) -> None:
        """What `copied_tokens` found, on the device."""
        self.token, self.slot, self.position = columns

    def write(self, store: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
        if len(self.token):
            write_tokens(store, key, value, self.token, self.slot, self.position)


def copied_tokens(spans: Sequence["_Span"]) -> np.ndarray:
    """Tokens, slots and positions, (3, tokens of all spans)."""
    counts, tokens, slots, positions = np.array(spans, dtype=np.int64).reshape(-1, 4).T
    inside = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
    return np.stack(
        [tokens.repeat(counts) + inside, slots.repeat(counts), positions.repeat(counts) + inside]
    )


_Span = tuple[int, int, int, int]
"""How many tokens, the first of them among all, the slot, and the position there of the first."""


def shared_spans(sequences: Sequence[PrefillSequence], where: Sequence[TokenSpans]) -> list[_Span]:
    """What prompts share, of each sequence that fills its prompt's slot."""
    total = sum(spans.num_known for spans in where)
    return [
        span
        for sequence, spans in zip(sequences, where, strict=True)
        if sequence.prompt_slot is not None and not sequence.pages
        for span in _spans(spans, 0, sequence.num_shared, sequence.prompt_slot, total)
    ]


def own_spans(sequences: Sequence[PrefillSequence], where: Sequence[TokenSpans]) -> list[_Span]:
    """What belongs in the rows' own slots, once for each of them.

    Where slots are cut into pages, prompts have none of their own: this is then everything.
    """
    total = sum(spans.num_known for spans in where)
    return [
        span
        for sequence, spans in zip(sequences, where, strict=True)
        for slot, first, end in (_page_pieces if sequence.pages else _slot_pieces)(sequence)
        for span in _spans(spans, first, end, slot, total)
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
        is_first_of_prompt = number == 0 and sequence.prompt_slot is not None
        first = 0 if is_first_of_prompt else sequence.num_shared
        for start in range(first, end, PAGE):
            pieces.append((pages[start // PAGE], start, min(start + PAGE, end)))
    return pieces


def _spans(spans: TokenSpans, first: int, end: int, slot: int, num_known: int) -> list[_Span]:
    """The tokens from `first` to `end` of a sequence: known ones, then new ones."""
    middle = min(max(spans.num_known, first), end)
    known = (middle - first, spans.first_known + first, slot, 0)
    new_first = num_known + spans.first_new + middle - spans.num_known
    new = (end - middle, new_first, slot, middle - first)
    return [span for span in (known, new) if span[0]]
