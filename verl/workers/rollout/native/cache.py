"""Keys and values of running sequences, and how the memory for them is laid out.

A prompt's keys are kept once for all its samples, in a prompt slot; each sample keeps those of its
own tokens in a response slot. A slot is as long as the longest prompt or response, so a sequence
that has one never runs out of memory. On a CPU the slots are made as sequences come, up to the most
that the budget allows; elsewhere all at once, because graphs remember addresses.

Slots are used wherever as many as `limits` ask for fit. Where they do not, kernels work on pages
(`pages`): responses are rarely as long as they may be, so many more sequences run at once. Plain
torch reads slices of the cache, and then runs fewer sequences.
"""

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.utils.device import memory_info
from verl.utils.distributed import all_reduce_
from verl.utils.steady_memory import SteadyMemory
from verl.workers.rollout.native.pages import PAGE, SCRATCH, pages_for
from verl.workers.rollout.native.scheduler import Move
from verl.workers.rollout.native.sequence import EngineLimits

KeysAndValues = tuple[Tensor, Tensor]

E4M3 = torch.float8_e4m3fn
LARGEST_E4M3 = 448.0


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values as the cache keeps them; larger numbers than e4m3 has become its largest."""
    return x.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3) if dtype == E4M3 else x


def as_bytes(x: Tensor) -> Tensor:
    """What torch can index and join on a CPU: e4m3 by its bytes, anything else as it is."""
    return x.view(torch.uint8) if x.dtype == E4M3 else x


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
                torch.cat(
                    [
                        as_bytes(shared)[prompt_slot, :, :num_shared],
                        as_bytes(own)[slot, :, :num_own],
                    ],
                    dim=1,
                ).view(own.dtype)
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
            store = as_bytes(slots)
            store[move.target, :, :num_tokens] = store[move.source, :, :num_tokens]


def _with_zeros(slots: Tensor, num_new: int) -> Tensor:
    """Zeros, because a slot's unused part takes part in products with weights of 0."""
    stored = as_bytes(slots)
    return torch.cat([stored, stored.new_zeros(num_new, *slots.shape[1:])]).view(slots.dtype)


class SteadyKVCache(KVCache):
    """All slots at once: there, or given back. What they hold after coming back is undefined."""

    def __init__(self, shape: CacheShape, max_slots: int) -> None:
        self.shape = shape
        self.max_slots = max_slots
        self._memory = SteadyMemory(shape.bytes_per_sequence * max_slots, shape.device)
        self._rest = self._memory.as_bytes()
        self.prompt = self._carve(shape.max_prompt_tokens)
        self.response = self._carve(shape.max_response_tokens)
        self._memory.unmap()

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes if self._memory.is_mapped else 0

    def free(self) -> None:
        self._memory.unmap()

    def reserve(self, num_prompt_slots: int, num_slots: int) -> None:
        self._memory.map()

    def _carve(self, num_tokens: int) -> list[KeysAndValues]:
        layers: list[KeysAndValues] = []
        for layer in self.shape.layers:
            pair = []
            for dim in (layer.key_dim, layer.value_dim):
                sizes = (self.max_slots, layer.num_kv_heads, num_tokens, dim)
                num_bytes = self.shape.dtype.itemsize
                for size in sizes:
                    num_bytes *= size
                pair.append(self._rest[:num_bytes].view(self.shape.dtype).view(sizes))
                self._rest = self._rest[num_bytes:]
            layers.append((pair[0], pair[1]))
        return layers


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """What the cache is made of."""

    shape: CacheShape
    """Of a slot; of a page where `is_paged`, and there is no slot for prompts."""

    num_slots: int
    """Or pages."""

    num_rows: int
    """Sequences that run at once at most."""

    num_kept: int = 0
    """How many of the slots or pages are there for sessions that wait for their next turn."""

    is_paged: bool = False


MOST_KEPT = 4
"""Slots or pages for sessions are at most so many times those of running sequences."""


def slots_that_fit(
    shape: CacheShape, limits: EngineLimits, group: dist.ProcessGroup | None = None
) -> CacheSize:
    """As many slots as `limits` ask for, or as fit into their memory; a warning says how many.

    `shape` is that of a slot; the ranks of `group` agree on the smallest number.
    """
    size = _slots(shape, limits, group)
    logger.info("cache: keys and values of %d sequences at once", size.num_rows)
    if size.num_slots < limits.max_num_seqs:
        logger.warning(
            "%d sequences run at once instead of rollout.max_num_seqs=%d: each takes %d MiB of "
            "the %d MiB for keys and values",
            size.num_slots,
            limits.max_num_seqs,
            size.shape.bytes_per_sequence >> 20,
            limits.max_cache_bytes >> 20,
        )
    return size


def slots_or_pages(
    shape: CacheShape, limits: EngineLimits, group: dist.ProcessGroup | None = None
) -> CacheSize:
    """Slots if all fit, else pages; and those of sessions, and one that is nobody's."""
    slots = _slots(shape, limits, group)
    if slots.num_slots == limits.max_num_seqs:
        num_kept = limits.max_session_bytes // shape.bytes_per_sequence - 1
        num_kept = _smallest_of_all(max(0, min(num_kept, MOST_KEPT * slots.num_rows)), group)
        return replace(slots, num_slots=1 + slots.num_rows + num_kept, num_kept=num_kept)
    page = replace(slots.shape, max_prompt_tokens=0, max_response_tokens=PAGE)
    num_pages = limits.max_cache_bytes // page.bytes_per_sequence
    num_pages = _smallest_of_all(num_pages, group)
    _refuse_too_few_pages(num_pages, limits)
    logger.warning(
        "keys and values of up to %d sequences (rollout.max_num_seqs) share memory for %d tokens, "
        "in pages of %d: enough for %d at full length",
        limits.max_num_seqs,
        num_pages * PAGE,
        PAGE,
        slots.num_slots,
    )
    num_kept = min(limits.max_session_bytes // page.bytes_per_sequence, MOST_KEPT * num_pages)
    num_kept = _smallest_of_all(num_kept, group)
    return CacheSize(
        shape=page,
        num_slots=num_pages + num_kept,
        num_rows=limits.max_num_seqs,
        num_kept=num_kept,
        is_paged=True,
    )


def _slots(
    shape: CacheShape, limits: EngineLimits, group: dist.ProcessGroup | None = None
) -> CacheSize:
    num_slots = _smallest_of_all(limits.num_slots(shape.bytes_per_sequence), group)
    return CacheSize(shape=shape, num_slots=num_slots, num_rows=num_slots)


def _smallest_of_all(number: int, group: dist.ProcessGroup | None) -> int:
    """Ranks that hold one model together admit equally many sequences."""
    if group is None:
        return number
    return int(all_reduce_(torch.tensor(number), dist.ReduceOp.MIN, group))


def _refuse_too_few_pages(num_pages: int, limits: EngineLimits) -> None:
    longest = limits.max_prompt_tokens + limits.max_response_tokens
    if num_pages - 1 < pages_for(longest):
        raise ValueError(
            f"max_cache_bytes of {limits.max_cache_bytes:,} is {num_pages} pages of {PAGE} tokens, "
            f"of which page {SCRATCH} is not used; one sequence of {limits.max_prompt_tokens} + "
            f"{limits.max_response_tokens} tokens takes {pages_for(longest)}: lower "
            "rollout.prompt_length or rollout.response_length, or raise the memory for the cache "
            "(rollout.gpu_memory_utilization)"
        )


CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def cache_budget(device: torch.device, share: float) -> int:
    """`share` of the device's memory in bytes; on a CPU, of the machine's or container's."""
    if device.type == "cpu":
        return int(share * host_memory())
    return int(share * memory_info(device)[1])


def beside_weights(limits: EngineLimits, module: nn.Module, num_ranks: int = 1) -> EngineLimits:
    """The limits of an engine with weights of its own, which take their part of its memory.
    `num_ranks` divide them."""
    weights = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    taken = weights // num_ranks
    return replace(limits, max_cache_bytes=max(1, limits.max_cache_bytes - taken))


def host_memory() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in CONTAINER_LIMITS:
        text = path.read_text().strip() if path.is_file() else "max"
        if text != "max":
            memory = min(memory, int(text))
    return memory
