"""Attention through kernels over slots that stay where they are; which row has which is a column.

`decode_attention` and `prefill_attention` hold the same in plain torch, which reads slices of the
cache and therefore keeps the occupied slots side by side.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from verl.models.attention import AttentionLayout, AttentionOptions
from verl.models.kernels.decode_attention import SlotRows, slot_decode_attention
from verl.models.varlen import VarlenLayout
from verl.workers.rollout.native.kv_cache import KVCache
from verl.workers.rollout.native.prefill_attention import PrefillSequence
from verl.workers.rollout.native.row_table import RowTable


class SlotDecodeLayout(AttentionLayout):
    """One new token for each row of the table; queries past those are padding and give zeros."""

    def __init__(self, cache: KVCache, table: RowTable) -> None:
        self.cache = cache
        self.num_rows = len(table.newest)
        self.rows = SlotRows(table.prompt_slot, table.slot, table.num_shared, table.places)

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
        return torch.nn.functional.pad(output, (0, 0, 0, 0, 0, num_padding))


class SlotPrefillLayout(AttentionLayout):
    """Whole sequences end to end; all keys and values go to their slots in a few copies.

    Tokens after the sequences are padding.
    """

    def __init__(self, cache: KVCache, sequences: Sequence[PrefillSequence]) -> None:
        self.cache = cache
        device = cache.shape.device
        self._inner = VarlenLayout([len(s.token_ids) for s in sequences], device)
        self._shared = _Copies(shared_spans(sequences), device)
        self._own = _Copies(own_spans(sequences), device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        self._shared.write(self.cache.prompt[layer], key, value)
        self._own.write(self.cache.response[layer], key, value)
        return self._inner.attend(layer, query, key, value, options)


class _Copies:
    """Token `token[i]` of a pass goes to `position[i]` of `slot[i]`."""

    def __init__(self, spans: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        """`spans` are (first token of the pass, how many, slot); positions count from 0."""
        counts = torch.tensor([count for _, count, _ in spans], dtype=torch.long)
        firsts = torch.tensor([first for first, _, _ in spans], dtype=torch.long)
        slots = torch.tensor([slot for _, _, slot in spans], dtype=torch.long)
        begins = counts.cumsum(0) - counts
        position = torch.arange(int(counts.sum())) - begins.repeat_interleave(counts)
        token = firsts.repeat_interleave(counts) + position
        columns = (token, slots.repeat_interleave(counts), position)
        self.token, self.slot, self.position = (column.to(device) for column in columns)

    def write(self, store: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
        if len(self.token):
            for slots, new in zip(store, (key, value), strict=True):
                slots[self.slot, :, self.position] = new[self.token]


def shared_spans(sequences: Sequence[PrefillSequence]) -> list[tuple[int, int, int]]:
    """What prompts share, of each sequence that fills its prompt's slot."""
    return [
        (start, sequence.num_shared, sequence.prompt_slot)
        for start, sequence in zip(starts(sequences), sequences, strict=True)
        if sequence.prompt_slot is not None
    ]


def own_spans(sequences: Sequence[PrefillSequence]) -> list[tuple[int, int, int]]:
    """What belongs in the rows' own slots, once for each of them."""
    return [
        (start + sequence.num_shared, len(sequence.token_ids) - sequence.num_shared, slot)
        for start, sequence in zip(starts(sequences), sequences, strict=True)
        for slot in sequence.slots
    ]


def starts(sequences: Sequence[PrefillSequence]) -> list[int]:
    lengths = [len(sequence.token_ids) for sequence in sequences]
    return [0, *accumulate(lengths)][: len(lengths)]
