"""Attention in plain torch: over sequences as they enter the cache, and of one new token per row.

Prefill: only new tokens run. Of a sequence whose beginning is known (an earlier turn of a session),
the kept keys and values are joined to the new ones. Sequences are attended to one at a time, so
that none sees another and none is rounded differently because of another.

Decode: the rows occupy the first slots, so a step reads plain slices. The prompt part is a product
of a group's queries with one shared block, the response part a product per row, and one softmax
runs over both. What the rows see is worked out once per step and shared by all layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.models.attention import AttentionLayout, AttentionOptions
from verl.models.exact import exact_attention, exact_sequence_attention
from verl.models.packed import block_attention, explicit_attention
from verl.utils.media import Media
from verl.workers.rollout.native.cache import KVCache, as_bytes, as_stored
from verl.workers.rollout.native.rows import RowTable
from verl.workers.rollout.native.sequence import KnownTokens


@dataclass(frozen=True, kw_only=True)
class PrefillSequence:
    """A sequence that enters the cache, and where its keys and values go."""

    token_ids: list[int]
    """All of it, what is known included."""

    num_shared: int
    """How many of its tokens belong in the prompt slot; the rest in response slots."""

    prompt_slot: int
    slots: list[int]
    fills_prompt: bool = True
    """False where another sequence of the same prompt fills its slot."""

    pages: list[list[int]] = field(default_factory=list)
    """Where slots are cut into pages: for each of them those of all its tokens, the shared ones
    included."""

    known: KnownTokens = field(default_factory=KnownTokens)
    """The first of its tokens whose keys and values need not be computed: kernels find them in the
    slots, plain torch gets copies."""

    media: tuple[Media, ...] = ()
    """Images among its tokens, those that are known included."""

    @property
    def num_known(self) -> int:
        return len(self.known.token_ids)

    @property
    def num_new(self) -> int:
        return len(self.token_ids) - self.num_known


def portions(
    sequences: Sequence[PrefillSequence], max_tokens: int
) -> Iterator[list[PrefillSequence]]:
    """Neighbours for one pass each: together at most so many new tokens, or one sequence alone."""
    portion: list[PrefillSequence] = []
    num_tokens = 0
    for sequence in sequences:
        if portion and num_tokens + sequence.num_new > max_tokens:
            yield portion
            portion, num_tokens = [], 0
        portion.append(sequence)
        num_tokens += sequence.num_new
    if portion:
        yield portion


class PrefillLayout(AttentionLayout):
    """New tokens of some sequences end to end; their keys and values stay in the slots.

    `exact_capacity` is that of an exact model, else None. Tokens after the sequences are padding.
    """

    def __init__(
        self, cache: KVCache, sequences: Sequence[PrefillSequence], exact_capacity: int | None
    ) -> None:
        self.cache = cache
        self.sequences = sequences
        self.exact_capacity = exact_capacity

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        output = query.new_zeros(*query.shape[:2], value.shape[2])
        start = 0
        for sequence in self.sequences:
            new = slice(start, start + sequence.num_new)
            keys, values = key[new], value[new]
            if sequence.num_known:
                known_keys, known_values = (x.to(key) for x in sequence.known.layers[layer])
                keys = torch.cat([known_keys, keys])
                values = torch.cat([known_values, values])
            self._keep(layer, sequence, keys, values)
            output[new] = self._attend(query[new], keys, values, options)
            start = new.stop
        return output

    def _keep(self, layer: int, sequence: PrefillSequence, keys: Tensor, values: Tensor) -> None:
        num_shared = sequence.num_shared
        num_own = len(sequence.token_ids) - num_shared
        prompt, response = self.cache.prompt[layer], self.cache.response[layer]
        for shared_store, own_store, new in zip(prompt, response, (keys, values), strict=True):
            by_head = as_bytes(as_stored(new, own_store.dtype)).transpose(0, 1)  # (KV, tokens, D)
            if sequence.fills_prompt:
                shared = by_head[:, :num_shared]
                as_bytes(shared_store)[sequence.prompt_slot, :, :num_shared] = shared
            if num_own:
                as_bytes(own_store)[sequence.slots, :, :num_own] = by_head[:, num_shared:]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        if self.exact_capacity is not None:
            return exact_sequence_attention(q, k, v, self.exact_capacity, options)
        return sequence_attention(q, k, v, options)


def sequence_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Queries (n, H, D) of the last n of the tokens whose keys and values (L, KV, D) are given."""
    num_known = len(k) - len(q)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # (1, heads, tokens, D)
    if num_known == 0:
        return block_attention(q, k, v, options)[0].transpose(0, 1)
    tokens = torch.arange(k.shape[2], device=k.device)
    distance = tokens[num_known:, None] - tokens
    is_visible = distance >= 0
    if options.sliding_window is not None:
        is_visible &= distance < options.sliding_window
    if options.softcap is None and options.sinks is None:
        output = F.scaled_dot_product_attention(
            q, k, v, is_visible, scale=options.scaling, enable_gqa=True
        )
    else:
        output = explicit_attention(q, k, v, is_visible, options)
    return output[0].transpose(0, 1)


class DecodeLayout(AttentionLayout):
    """One new token for each of the first B response slots, for as many steps as there are columns.

    `prompt_slots` says which prompt each row belongs to. Rows past B in a query are padding; their
    result is zero. `begin_step` must be called whenever the table has advanced.
    """

    def __init__(
        self,
        cache: KVCache,
        rows: RowTable,
        prompt_slots: Sequence[int],
        *,
        num_prompt_columns: int,
        num_own_columns: int,
        is_exact: bool,
    ) -> None:
        self.cache = cache
        self.is_exact = is_exact
        self.rows = rows
        self.num_rows = len(prompt_slots)
        self.groups = _Groups.of(prompt_slots, cache.shape.device)
        self._row_numbers = torch.arange(self.num_rows, device=cache.shape.device)
        self._prompt_columns = torch.arange(num_prompt_columns, device=cache.shape.device)
        self._own_columns = torch.arange(num_own_columns, device=cache.shape.device)

    def begin_step(self) -> None:
        """Compute distances and masks for the current lengths of the rows."""
        self._slot_positions = self.rows.slot_positions
        num_shared, positions = self.rows.num_shared[:, None], self._slot_positions[:, None]
        # How far back each key lies, (B, columns): 0 is the new token itself.
        self._distance = torch.cat(
            [num_shared + positions - self._prompt_columns, positions - self._own_columns], dim=1
        )
        is_hidden = torch.cat(
            [self._prompt_columns >= num_shared, self._own_columns > positions], dim=1
        )
        self._biases: dict[int | None, Tensor] = {None: _hide(is_hidden)}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        num_padding = len(query) - self.num_rows
        query, key, value = (x[: self.num_rows] for x in (query, key, value))
        for own, new in zip(self.cache.response[layer], (key, value), strict=True):
            stored = as_bytes(as_stored(new, own.dtype))
            as_bytes(own)[self._row_numbers, :, self._slot_positions] = stored
        attend = self._attend_exactly if self.is_exact else self._attend_rows
        output = attend(layer, query, options)
        return F.pad(output, (0, 0, 0, 0, 0, num_padding))

    def _attend_rows(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        num_prompt, num_own = len(self._prompt_columns), len(self._own_columns)
        prompt_keys, prompt_values = (
            x[: self.groups.num_groups, :, :num_prompt].to(query) for x in self.cache.prompt[layer]
        )
        keys, values = (
            x[: self.num_rows, :, :num_own].to(query) for x in self.cache.response[layer]
        )
        q = query.unflatten(1, (keys.shape[1], -1))  # (B, KV, heads per KV, D)
        prompt_scores = self.groups.split(self.groups.join(q) @ prompt_keys.transpose(-1, -2))
        scores = torch.cat([prompt_scores, q @ keys.transpose(-1, -2)], dim=-1).float()
        weights = self._softmax(scores, options).to(values.dtype)
        of_prompt, of_own = weights.split([num_prompt, num_own], dim=-1)
        output = self.groups.split(self.groups.join(of_prompt) @ prompt_values)
        return (output + of_own @ values).flatten(1, 2)  # (B, heads, D)

    def _softmax(self, scores: Tensor, options: AttentionOptions) -> Tensor:
        scores = scores.mul_(options.scaling)
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        scores = scores.add_(self._bias(options.sliding_window))
        if options.sinks is None:
            return scores.softmax(-1)
        sinks = options.sinks.view(1, scores.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks.float()], dim=-1).softmax(-1)[..., :-1]

    def _bias(self, window: int | None) -> Tensor:
        """(B, 1, 1, columns): 0 where a row's new token sees a column, else minus infinity."""
        if window is not None and window not in self._biases:
            self._biases[window] = self._biases[None] + _hide(self._distance >= window)
        return self._biases[window]

    def _attend_exactly(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """The same in the shapes of exact training; everything is in the rows' own slots."""
        assert not len(self._prompt_columns)
        keys, values = (x[: self.num_rows] for x in self.cache.response[layer])
        return exact_attention(
            query[:, None], keys, values, self._slot_positions[:, None], options
        )[:, 0]


def _hide(is_hidden: Tensor) -> Tensor:
    bias = torch.zeros(is_hidden.shape, device=is_hidden.device).masked_fill_(is_hidden, -torch.inf)
    return bias[:, None, None]


@dataclass(frozen=True)
class _Groups:
    """Rows of one prompt side by side: (B, ...) to (groups, KV, rows in a group x heads, ...)."""

    num_groups: int
    width: int
    """Rows of the largest group."""

    row_of_entry: Tensor
    """(groups * width,) the row of each entry; padding repeats any row."""

    group_of_row: Tensor
    rank_of_row: Tensor
    is_trivial: bool
    """Row i is all of group i."""

    @classmethod
    def of(cls, group_of_row: Sequence[int], device: torch.device) -> "_Groups":
        num_groups = max(group_of_row) + 1
        members: list[list[int]] = [[] for _ in range(num_groups)]
        ranks = []
        for row, group in enumerate(group_of_row):
            ranks.append(len(members[group]))
            members[group].append(row)
        width = max(len(rows) for rows in members)
        entries = [row for rows in members for row in rows + [0] * (width - len(rows))]
        return cls(
            num_groups,
            width,
            torch.tensor(entries, device=device),
            torch.tensor(group_of_row, device=device),
            torch.tensor(ranks, device=device),
            is_trivial=list(group_of_row) == list(range(num_groups)),
        )

    def join(self, x: Tensor) -> Tensor:
        """(B, KV, h, C) to (groups, KV, width * h, C)."""
        if self.is_trivial:
            return x
        grid = x.index_select(0, self.row_of_entry).unflatten(0, (self.num_groups, self.width))
        return grid.transpose(1, 2).flatten(2, 3)

    def split(self, x: Tensor) -> Tensor:
        """The way back."""
        if self.is_trivial:
            return x
        return x.unflatten(2, (self.width, -1))[self.group_of_row, :, self.rank_of_row]
