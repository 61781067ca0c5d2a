"""Attention over sequences as they enter the cache.

Only new tokens run: of a sequence whose beginning is known (an earlier turn of a conversation), the
keys and values of that part are joined to the new ones. Sequences are attended to one at a time, so
that none sees another and none is rounded differently because of another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.models.attention import AttentionLayout, AttentionOptions
from verl.models.exact import exact_sequence_attention
from verl.models.packed import block_attention, explicit_attention
from verl.workers.rollout.native.kv_cache import KVCache
from verl.workers.rollout.native.sessions import KnownTokens


@dataclass(frozen=True, kw_only=True)
class PrefillSequence:
    """A sequence that enters the cache, and where its keys and values go."""

    token_ids: list[int]
    """All of it, what is known included."""

    num_shared: int
    """How many of its tokens belong in the prompt slot; the rest in response slots."""

    prompt_slot: int | None
    """None where another sequence of the same prompt has filled it."""

    slots: list[int]
    pages: list[list[int]] = field(default_factory=list)
    """Where slots are cut into pages: for each of them those of all its tokens, the shared ones
    included."""

    known: KnownTokens = field(default_factory=KnownTokens)
    """The first of its tokens whose keys and values need not be computed."""

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
                known_keys, known_values = sequence.known.layers[layer]
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
            by_head = new.transpose(0, 1)  # (KV heads, tokens, head dim)
            if sequence.prompt_slot is not None:
                shared_store[sequence.prompt_slot, :, :num_shared] = by_head[:, :num_shared]
            if num_own:
                own_store[sequence.slots, :, :num_own] = by_head[:, num_shared:]

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
