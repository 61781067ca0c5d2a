"""Batches on a device with kernels: sequences in slots, or in pages where memory is short.

Both make the same steps (`KernelSteps`) and differ in where keys and values are. With pages a slot
is a row of a table of pages, and the cache is one store of pages for prompts and responses alike.
Which pages a sequence holds is decided by the `PageBudget`, before the steps that need them; here
the device is told. Page numbers of a slot change between steps only, and memory changes hands in
the order of the stream: steps in flight have been computed before the next holder of a page writes
to it.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from verl.models.kernels.attention_blocks import BLOCK
from verl.workers.rollout.native.attention import PrefillSequence
from verl.workers.rollout.native.batch import Batch, StepOutput
from verl.workers.rollout.native.cache import CacheSize, KVCache, SteadyKVCache
from verl.workers.rollout.native.kernel_steps import KernelSteps
from verl.workers.rollout.native.model_runner import ModelRunner
from verl.workers.rollout.native.pages import (
    PAGE,
    HeldPages,
    PageBudget,
    PageTable,
    SlotPoolBudget,
    pages_for,
)
from verl.workers.rollout.native.rows import in_one_copy
from verl.workers.rollout.native.scheduler import Move
from verl.workers.rollout.native.sequence import EngineLimits, Group, KnownTokens, Sample
from verl.workers.rollout.native.slot_layouts import (
    SlotCopies,
    SlotDecodeLayout,
    Span,
    copied_tokens,
)

assert PAGE == BLOCK, "a page holds one block of attention"


class KernelBatch(Batch):
    """Every sequence has a slot that is long enough."""

    def __init__(self, runner: ModelRunner, limits: EngineLimits, size: CacheSize) -> None:
        self.cache = cache = build_cache(size)
        self.num_rows = size.num_rows
        self.budget = self._owners = SlotPoolBudget(
            size.num_rows,
            size.num_kept,
            prompt_tokens=size.shape.max_prompt_tokens,
            response_tokens=size.shape.max_response_tokens,
        )
        self.steps = KernelSteps(
            runner,
            limits,
            cache,
            self._owners,
            size.num_rows,
            lambda table: SlotDecodeLayout(cache, table),
        )

    def prefill(
        self, samples: Sequence[Sample], sequences: Sequence[PrefillSequence], num_groups: int
    ) -> list[StepOutput]:
        return self.steps.prefill(samples, sequences)

    def decode(self, samples: Sequence[Sample]) -> list[StepOutput]:
        return self.steps.decode(samples)

    def move_rows(self, moves: Sequence[tuple[Move, Sample]]) -> None:
        self.steps.move_rows(moves)

    def move_group(self, move: Move, group: Group) -> None:
        """Its slot stays where it is."""

    def keep(self, sample: Sample) -> KnownTokens:
        return KnownTokens(sample.identity[:-1], kept=self._owners.keep(sample))

    def let_evict(self, evict: Callable[[], bool]) -> None:
        self._owners.evict = evict

    def relocate(self, groups: Sequence[Group]) -> None:
        """All are read before any is written: the slot of one may have become another's."""
        moved = [group for group in groups if group.known.kept and group.known.kept.moved_from]
        if not moved:
            return
        spans: list[list[Span]] = [[], [], [], []]
        num_tokens = 0
        for group in moved:
            for column, span in zip(spans, _known_spans(group, self._owners), strict=True):
                count, token, slot, position = span
                column.append((count, num_tokens + token, slot, position))
            num_tokens += len(group.known.token_ids)
        columns = [torch.from_numpy(copied_tokens(column)) for column in spans]
        from_prompt, from_own, to_prompt, to_own = in_one_copy(columns, self.cache.shape.device)
        for prompt, response in zip(self.cache.prompt, self.cache.response, strict=True):
            keys, values = (own.new_empty(num_tokens, *own.shape[1::2]) for own in response)
            for target, shared, own in zip((keys, values), prompt, response, strict=True):
                target[from_prompt[0]] = shared[from_prompt[1], :, from_prompt[2]]
                target[from_own[0]] = own[from_own[1], :, from_own[2]]
            SlotCopies(to_prompt).write(prompt, keys, values)
            SlotCopies(to_own).write(response, keys, values)

    def flush(self) -> list[StepOutput]:
        return self.steps.flush()

    def reset(self) -> None:
        self.steps.reset()


class PagedBatch(Batch):
    """Sequences take memory, in pages, as they grow."""

    def __init__(self, runner: ModelRunner, limits: EngineLimits, size: CacheSize) -> None:
        max_tokens = limits.max_prompt_tokens + limits.max_response_tokens
        self.cache = cache = build_cache(size)
        self.num_rows = size.num_rows
        self.budget = self._held = PageBudget(
            size.num_slots,
            num_rows=size.num_rows,
            max_tokens=max_tokens,
            lookahead=2 * limits.tokens_per_step,  # the steps in flight, and the next
            num_kept=size.num_kept,
        )
        pages = self._pages = PageTable(1 + size.num_rows, pages_for(max_tokens), runner.device)
        self.steps = KernelSteps(
            runner,
            limits,
            cache,
            self._held,
            size.num_rows,
            lambda table: SlotDecodeLayout(cache, table, pages.pages),
            pages.pages,
        )

    def prefill(
        self, samples: Sequence[Sample], sequences: Sequence[PrefillSequence], num_groups: int
    ) -> list[StepOutput]:
        pages = {sample.slot: self._held.pages_of(sample) for sample in samples}
        placed = [
            dataclasses.replace(sequence, pages=[pages[row] for row in sequence.slots])
            for sequence in sequences
        ]
        if any(sequence.num_known for sequence in sequences):
            self._pages.update(self._pages_of(samples), keeps_others=True)
        return self.steps.prefill(samples, placed)

    def decode(self, samples: Sequence[Sample]) -> list[StepOutput]:
        self._pages.update(self._pages_of(samples))
        return self.steps.decode(samples)

    def _pages_of(self, samples: Sequence[Sample]) -> dict[int, HeldPages]:
        held, slot_of = self._held.pool.held, self._held.slot_of
        return {slot_of(sample): (held(sample.group), held(sample)) for sample in samples}

    def move_rows(self, moves: Sequence[tuple[Move, Sample]]) -> None:
        self.steps.move_rows(moves)

    def move_group(self, move: Move, group: Group) -> None:
        """Its pages stay where they are."""

    def keep(self, sample: Sample) -> KnownTokens:
        return KnownTokens(sample.identity[:-1], kept=self._held.keep(sample))

    def let_evict(self, evict: Callable[[], bool]) -> None:
        self._held.evict = evict

    def reserve(self, samples: Sequence[Sample]) -> bool:
        """For as many response tokens as each may have when the next steps are done."""
        steps = self.steps.limits.tokens_per_step
        ahead = self.steps.num_ahead(samples)
        reach = [s.num_tokens + num + steps for s, num in zip(samples, ahead, strict=True)]
        return self._held.grow(samples, reach)

    def flush(self) -> list[StepOutput]:
        return self.steps.flush()

    def reset(self) -> None:
        self.steps.reset()
        self._pages.reset()


def _known_spans(group: Group, owners: SlotPoolBudget) -> tuple[Span, Span, Span, Span]:
    """Known tokens of a group in the prompt slot and in the other: where they are, and where they
    belong."""
    kept, (sample,) = group.known.kept, group.samples
    assert kept is not None
    assert kept.moved_from is not None
    num_known = len(group.known.token_ids)

    def spans(num_shared: int, prompt_slot: int, slot: int) -> tuple[Span, Span]:
        num_shared = min(num_shared, num_known)
        return (num_shared, 0, prompt_slot, 0), (num_known - num_shared, num_shared, slot, 0)

    target = owners.prompt_slot_of(group), owners.slot_of(sample)
    return (*spans(kept.num_shared, *kept.moved_from), *spans(group.num_shared, *target))


def build_cache(size: CacheSize) -> KVCache:
    """On CUDA one whose addresses stay, because graphs remember them."""
    kind = SteadyKVCache if size.shape.device.type == "cuda" else KVCache
    return kind(size.shape, size.num_slots)
