"""Keys and values of all running sequences.

A prompt's keys are kept once for all its samples, in a prompt slot; each sample keeps those of its
own tokens in a response slot. A slot is as long as the longest prompt or response, so a sequence
that has one never runs out of room. On a CPU the slots are made as sequences come, up to the most
that the budget allows; elsewhere all at once, because graphs remember addresses.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.workers.rollout.native.scheduler import Move

KeysAndValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class HeadShape:
    """What one layer keeps of a token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """How much the cache holds at most; as many prompt slots as response slots."""

    layers: list[HeadShape]
    max_prompt_tokens: int
    max_response_tokens: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        numbers = sum(
            layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in self.layers
        )
        return numbers * self.dtype.itemsize

    @property
    def bytes_per_sequence(self) -> int:
        """One prompt slot and one response slot."""
        return self.bytes_per_token * (self.max_prompt_tokens + self.max_response_tokens)


class KVCache:
    """Slots for prompts and for responses, per layer (slots, KV heads, tokens, head dim)."""

    def __init__(self, shape: CacheShape, max_slots: int) -> None:
        self.shape = shape
        self.max_slots = max_slots
        self.free()

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for pair in (*self.prompt, *self.response) for x in pair)

    def free(self) -> None:
        """Give all memory back."""
        self.prompt: list[KeysAndValues] = self._slots(0, self.shape.max_prompt_tokens)
        self.response: list[KeysAndValues] = self._slots(0, self.shape.max_response_tokens)

    def reserve(self, num_prompt_slots: int, num_slots: int) -> None:
        """See that there are so many slots. What they hold stays."""
        self._grow(self.prompt, num_prompt_slots)
        self._grow(self.response, num_slots)

    def move_prompt(self, move: Move, num_tokens: int) -> None:
        _move(self.prompt, move, num_tokens)

    def move_response(self, move: Move, num_tokens: int) -> None:
        _move(self.response, move, num_tokens)

    def read(
        self, prompt_slot: int, num_shared: int, slot: int, num_own: int
    ) -> list[KeysAndValues]:
        """A copy of one sequence: per layer keys and values, (tokens, KV heads, head dim) each."""
        layers = []
        for prompt, response in zip(self.prompt, self.response, strict=True):
            keys, values = (
                torch.cat([shared[prompt_slot, :, :num_shared], own[slot, :, :num_own]], dim=1)
                for shared, own in zip(prompt, response, strict=True)
            )
            layers.append((keys.transpose(0, 1), values.transpose(0, 1)))
        return layers

    def _slots(self, num_slots: int, num_tokens: int) -> list[KeysAndValues]:
        shape = self.shape

        def zeros(num_kv_heads: int, dim: int) -> Tensor:
            return torch.zeros(
                num_slots, num_kv_heads, num_tokens, dim, dtype=shape.dtype, device=shape.device
            )

        return [
            (zeros(layer.num_kv_heads, layer.key_dim), zeros(layer.num_kv_heads, layer.value_dim))
            for layer in shape.layers
        ]

    def _grow(self, store: list[KeysAndValues], num_slots: int) -> None:
        present = len(store[0][0])
        if num_slots <= present:
            return
        assert num_slots <= self.max_slots
        num_new = min(max(num_slots, 2 * present), self.max_slots) - present
        for layer, (keys, values) in enumerate(store):  # one at a time: less memory in between
            store[layer] = (_with_zeros(keys, num_new), _with_zeros(values, num_new))


def _move(store: list[KeysAndValues], move: Move, num_tokens: int) -> None:
    for pair in store:
        for slots in pair:
            slots[move.target, :, :num_tokens] = slots[move.source, :, :num_tokens]


def _with_zeros(slots: Tensor, num_new: int) -> Tensor:
    """Zeros, because a slot's unused part takes part in products with weights of 0."""
    return torch.cat([slots, slots.new_zeros(num_new, *slots.shape[1:])])
