"""Batches on a device with kernels: sequences in slots, or in pages where memory is short.

Both make the same steps (`KernelSteps`) and differ in where keys and values are. With pages a slot
is a row of a table of pages, and the cache is one store of pages for prompts and responses alike.
Which pages a sequence holds is decided by the `PageBudget`, before the steps that need them; here
the device is told. Page numbers of a slot change between steps only, and memory changes hands in
the order of the stream: steps in flight have been computed before the next holder of a page writes
to it.
"""

import dataclasses
from collections.abc import Sequence

import torch

from verl.models.kernels.attention_blocks import BLOCK
from verl.utils.device import without_waiting
from verl.workers.rollout.native.attention import PrefillSequence
from verl.workers.rollout.native.batch import Batch, StepOutput
from verl.workers.rollout.native.cache import CacheSize, KeysAndValues, KVCache, SteadyKVCache
from verl.workers.rollout.native.kernel_steps import KernelSteps
from verl.workers.rollout.native.model_runner import ModelRunner
from verl.workers.rollout.native.pages import PAGE, PageBudget, PageTable, SlotBudget, pages_for
from verl.workers.rollout.native.scheduler import Move
from verl.workers.rollout.native.sequence import EngineLimits, Group, Sample
from verl.workers.rollout.native.slot_layouts import SlotDecodeLayout

assert PAGE == BLOCK, "a page holds one block of attention"


class KernelBatch(Batch):
    """Every sequence has a slot that is long enough."""

    def __init__(self, runner: ModelRunner, limits: EngineLimits, size: CacheSize) -> None:
        self.cache = cache = build_cache(size)
        self.num_rows = size.num_rows
        self.budget = SlotBudget(size.num_rows, size.shape.max_prompt_tokens)
        self.steps = KernelSteps(
            runner, limits, cache, size.num_rows, lambda table: SlotDecodeLayout(cache, table)
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
        self.steps.move_group(move)

    def read(self, sample: Sample, num_own: int) -> list[KeysAndValues]:
        group = sample.group
        prompt_slot = self.steps.slot_of_prompt[group.slot]
        slot = self.steps.slot_of_row[sample.slot]
        return self.cache.read(prompt_slot, group.num_shared, slot, num_own)

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
        )
        pages = self._pages = PageTable(size.num_rows, pages_for(max_tokens), runner.device)
        self.steps = KernelSteps(
            runner,
            limits,
            cache,
            size.num_rows,
            lambda table: SlotDecodeLayout(cache, table, pages.pages),
        )

    def prefill(
        self, samples: Sequence[Sample], sequences: Sequence[PrefillSequence], num_groups: int
    ) -> list[StepOutput]:
        pages = {sample.slot: self._held.pages_of(sample) for sample in samples}
        placed = [
            dataclasses.replace(sequence, pages=[pages[row] for row in sequence.slots])
            for sequence in sequences
        ]
        return self.steps.prefill(samples, placed)

    def decode(self, samples: Sequence[Sample]) -> list[StepOutput]:
        held, slot_of_row = self._held.pool.held, self.steps.slot_of_row
        self._pages.update({slot_of_row[s.slot]: (held(s.group), held(s)) for s in samples})
        return self.steps.decode(samples)

    def move_rows(self, moves: Sequence[tuple[Move, Sample]]) -> None:
        self.steps.move_rows(moves)

    def move_group(self, move: Move, group: Group) -> None:
        self.steps.move_group(move)

    def read(self, sample: Sample, num_own: int) -> list[KeysAndValues]:
        num_tokens = sample.group.num_shared + num_own
        numbers = self._held.pages_of(sample)[: pages_for(num_tokens)]
        indices = torch.tensor(numbers, dtype=torch.long)
        pages = without_waiting(indices, self.cache.shape.device)

        def gathered(store: torch.Tensor) -> torch.Tensor:
            return store[pages].transpose(1, 2).flatten(0, 1)[:num_tokens]

        return [(gathered(keys), gathered(values)) for keys, values in self.cache.response]

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


def build_cache(size: CacheSize) -> KVCache:
    """On CUDA one whose addresses stay, because graphs remember them."""
    kind = SteadyKVCache if size.shape.device.type == "cuda" else KVCache
    return kind(size.shape, size.num_slots)
