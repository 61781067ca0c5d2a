"""The running sequences on a device with kernels, where their slots are cut into pages.

A slot is then a row of a table of pages, and the cache is one store of pages for prompts and
responses alike. Which pages a sequence holds is decided in `room`, before the steps that need them;
here they are told to the device. Page numbers of a slot change between steps only, and memory
changes hands in the order of the stream: steps in flight have been computed before the next holder
of a page writes to it.
"""

import dataclasses
from collections.abc import Sequence

import torch

from verl.models.attention import AttentionLayout
from verl.models.kernels.attention_blocks import BLOCK
from verl.utils.device import without_waiting
from verl.workers.rollout.native.cache_size import CacheSize
from verl.workers.rollout.native.kernel_batch import KernelBatch
from verl.workers.rollout.native.kv_cache import KeysAndValues
from verl.workers.rollout.native.model_runner import ModelRunner
from verl.workers.rollout.native.page_pool import PAGE, pages_for
from verl.workers.rollout.native.page_table import PageTable
from verl.workers.rollout.native.prefill_attention import PrefillSequence
from verl.workers.rollout.native.requests import EngineLimits
from verl.workers.rollout.native.room import PagedRoom
from verl.workers.rollout.native.row_table import RowTable
from verl.workers.rollout.native.running_batch import StepOutput
from verl.workers.rollout.native.sequence import Sample
from verl.workers.rollout.native.slot_layouts import SlotDecodeLayout

assert PAGE == BLOCK, "a page holds one block of attention"


class PagedBatch(KernelBatch):
    """A `KernelBatch` whose sequences take memory as they grow."""

    def __init__(self, runner: ModelRunner, limits: EngineLimits, size: CacheSize) -> None:
        max_tokens = limits.max_prompt_tokens + limits.max_response_tokens
        self._pages = PageTable(size.num_rows, pages_for(max_tokens), runner.device)
        super().__init__(runner, limits, size)
        self.room = self._holders = PagedRoom(
            size.num_slots,
            num_rows=size.num_rows,
            max_tokens=max_tokens,
            stretch=2 * limits.steps_per_visit,  # those in flight, and the next
        )

    def reset(self) -> None:
        super().reset()
        self._pages.reset()

    def make_room(self, samples: Sequence[Sample]) -> bool:
        return self._holders.grow(samples, self._reach(samples))

    def prefill(
        self, samples: Sequence[Sample], sequences: Sequence[PrefillSequence], num_groups: int
    ) -> list[StepOutput]:
        pages = {sample.slot: self._holders.pages_of(sample) for sample in samples}
        placed = [
            dataclasses.replace(sequence, pages=[pages[row] for row in sequence.slots])
            for sequence in sequences
        ]
        return super().prefill(samples, placed, num_groups)

    def decode(self, samples: Sequence[Sample]) -> list[StepOutput]:
        held = self._holders.pool.held
        self._pages.update({self._slot_of_row[s.slot]: (held(s.group), held(s)) for s in samples})
        return super().decode(samples)

    def read(self, sample: Sample, num_own: int) -> list[KeysAndValues]:
        num_tokens = sample.group.num_shared + num_own
        numbers = self._holders.pages_of(sample)[: pages_for(num_tokens)]
        pages = without_waiting(torch.tensor(numbers, dtype=torch.long), self.runner.device)

        def gathered(store: torch.Tensor) -> torch.Tensor:
            return store[pages].transpose(1, 2).flatten(0, 1)[:num_tokens]

        return [(gathered(keys), gathered(values)) for keys, values in self.cache.response]

    def _decode_layout(self, table: RowTable) -> AttentionLayout:
        return SlotDecodeLayout(self.cache, table, self._pages.pages)

    def _reach(self, samples: Sequence[Sample]) -> list[int]:
        """Most response tokens that each may have when the next steps are done."""
        steps = self.limits.steps_per_visit
        return [
            sample.num_tokens + num_ahead + steps
            for sample, num_ahead in zip(samples, self._num_ahead(samples), strict=True)
        ]
