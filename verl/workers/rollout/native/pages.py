"""The memory budget for keys and values: admission, preemption, and pages.

With slots (`SlotBudget`) a sequence has memory for its longest response from the start: there is
nothing to decide. With pages (`PageBudget`) a prompt holds those of its whole blocks, and each of
its samples those of what follows, as many as it has come to need. A page holds `PAGE` consecutive
tokens of one sequence, in every layer.

Admission. A group is admitted if there are pages for what it brings and then still enough for the
lookahead of every running sequence, its own included: what the next steps may write. No more is
kept back. Nobody knows how long responses become, and recomputing some tokens costs less than
leaving memory empty: a prefill is faster than the steps that gave them.

Preemption. If pages run out, the youngest running group frees its own and waits, first in the
queue, until it fits again (`Scheduler.youngest`).

Progress. `most_samples` keeps groups so small that the longest responses of one fit into all pages.
Running groups are older than all waiting ones, since the queue admits the oldest and only the
youngest is preempted. So the oldest group runs as soon as the engine steps: no other runs without
it, and where none runs it fits. It is never preempted: a younger group would be, and if there is
none, it has all the pages it can need. Each step gives its samples tokens, of which there are
finitely many; then the next group is the oldest.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import torch

from verl.utils.device import without_waiting
from verl.workers.rollout.native.sequence import Group, Sample

PAGE = 64
"""Tokens of a page: one key block of attention, so that a block lies in one page."""

SCRATCH = 0
"""The page that belongs to no sequence: unused rows of a step write there and do no harm."""


class MemoryBudget(ABC):
    """Memory for keys and values, as the scheduler sees it."""

    @abstractmethod
    def most_samples(self, prompt_tokens: int, max_tokens: int) -> int:
        """How large a group may be, given the lengths of its prompt and of its responses."""

    @abstractmethod
    def most_shared(self, prompt_tokens: int) -> int:
        """How much of a prompt of that length can be kept once for all samples."""

    @abstractmethod
    def begin_admission(self, rows: Sequence[Sample]) -> None:
        """Note the running rows before `fits` is called for waiting groups."""

    @abstractmethod
    def fits(self, group: Group) -> bool:
        """Whether a group may be admitted beside those that run or were just admitted."""

    @abstractmethod
    def admit(self, group: Group) -> None:
        """Take what a group's prompt and what its unfinished samples need at first."""

    @abstractmethod
    def release(self, holder: Group | Sample) -> None:
        """Give back what a group or a sample holds."""

    @abstractmethod
    def clear(self) -> None:
        """Everybody gives everything back."""


class SlotBudget(MemoryBudget):
    """Admission without pages: a row has a slot, and a slot is long enough."""

    def __init__(self, num_rows: int, slot_tokens: int) -> None:
        """`slot_tokens` is the length of a prompt slot."""
        self.num_rows = num_rows
        self.slot_tokens = slot_tokens

    def most_samples(self, prompt_tokens: int, max_tokens: int) -> int:
        return self.num_rows

    def most_shared(self, prompt_tokens: int) -> int:
        return self.slot_tokens

    def begin_admission(self, rows: Sequence[Sample]) -> None:
        pass

    def fits(self, group: Group) -> bool:
        return True

    def admit(self, group: Group) -> None:
        pass

    def release(self, holder: Group | Sample) -> None:
        pass

    def clear(self) -> None:
        pass


class PageBudget(MemoryBudget):
    """Pages for prompts and continuations; holders are groups and samples."""

    def __init__(self, num_pages: int, *, num_rows: int, max_tokens: int, lookahead: int) -> None:
        """`max_tokens` bounds a sequence, `lookahead` what the next steps may add to it."""
        self.pool = PagePool(num_pages)
        self.num_rows = num_rows
        self.max_tokens = max_tokens
        self._lookahead = pages_for(lookahead)
        self._vacancy = 0

    def most_samples(self, prompt_tokens: int, max_tokens: int) -> int:
        shared = self.most_shared(prompt_tokens)
        longest = min(prompt_tokens + max_tokens, self.max_tokens) - shared
        num_pages = self.pool.capacity - pages_for(shared)
        return max(1, min(self.num_rows, num_pages // max(1, pages_for(longest))))

    def most_shared(self, prompt_tokens: int) -> int:
        """Whole blocks: the rest shares its block, and so its page, with each response."""
        return prompt_tokens - prompt_tokens % PAGE

    def begin_admission(self, rows: Sequence[Sample]) -> None:
        kept = sum(self._growth(row, len(self.pool.held(row))) for row in rows)
        self._vacancy = self.pool.num_free - kept

    def fits(self, group: Group) -> bool:
        return self._price(group) <= self._vacancy

    def admit(self, group: Group) -> None:
        self._vacancy -= self._price(group)
        self.pool.take(group, pages_for(group.num_shared))
        for sample in group.unfinished:
            self.pool.take(sample, pages_for(sample.num_own + 1))

    def grow(self, rows: Sequence[Sample], reach: Sequence[int]) -> bool:
        """Give rows pages for so many response tokens; False, and none, if there are too few."""
        missing = [
            pages_for(self._own_tokens(row, num_tokens)) - len(self.pool.held(row))
            for row, num_tokens in zip(rows, reach, strict=True)
        ]
        if sum(number for number in missing if number > 0) > self.pool.num_free:
            return False
        for row, number in zip(rows, missing, strict=True):
            if number > 0:
                self.pool.take(row, number)
        return True

    def release(self, holder: Group | Sample) -> None:
        self.pool.free(holder)

    def clear(self) -> None:
        self.pool.clear()

    def pages_of(self, sample: Sample) -> list[int]:
        """Those of the prompt, then its own: page k holds the tokens from k * `PAGE` on."""
        return [*self.pool.held(sample.group), *self.pool.held(sample)]

    def _price(self, group: Group) -> int:
        """Pages that a group takes when it is admitted, and the lookahead of each sample."""
        own = [(sample, pages_for(sample.num_own + 1)) for sample in group.unfinished]
        shared = pages_for(group.num_shared)
        return shared + sum(number + self._growth(sample, number) for sample, number in own)

    def _growth(self, sample: Sample, num_held: int) -> int:
        """Pages to be kept for a sample that holds so many: no more than it may ever need."""
        most = pages_for(self._own_tokens(sample, sample.group.token_limit))
        return min(self._lookahead, most - num_held)

    def _own_tokens(self, sample: Sample, num_tokens: int) -> int:
        """Of its own pages, if its response has so many tokens, or the most it may have."""
        group = sample.group
        return len(group.prompt_ids) - group.num_shared + min(num_tokens, group.token_limit)


class PagePool:
    """`num_pages` pages, `SCRATCH` among them."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.clear()

    @property
    def capacity(self) -> int:
        """Pages that can be held at once."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, holder: Hashable, num_pages: int) -> None:
        """Give somebody more pages, behind those that it has; there must be so many."""
        assert 0 <= num_pages <= self.num_free, f"{num_pages} of {self.num_free} pages are wanted"
        pages = self._held.setdefault(holder, [])
        for _ in range(num_pages):
            pages.append(self._free.pop())

    def held(self, holder: Hashable) -> Sequence[int]:
        """The pages of somebody who has taken some, in the order in which they were taken.

        It is the same object until they are given back, and grows with them.
        """
        return self._held[holder]

    def free(self, holder: Hashable) -> None:
        """All that somebody has taken; it must have."""
        self._free += self._held.pop(holder)

    def clear(self) -> None:
        """Free all pages."""
        self._held: dict[Hashable, list[int]] = {}
        self._free = [page for page in reversed(range(self.num_pages)) if page != SCRATCH]


def pages_for(num_tokens: int) -> int:
    """How many pages so many tokens take."""
    return -(-num_tokens // PAGE)


HeldPages = tuple[Sequence[int], Sequence[int]]
"""Those of a prompt, and those of a sample: live lists, as `PagePool.held` gives them."""


class PageTable:
    """`pages` (slots, blocks) int32, on the device."""

    def __init__(self, num_slots: int, num_blocks: int, device: torch.device) -> None:
        self.pages = torch.full((num_slots, num_blocks), SCRATCH, dtype=torch.int32, device=device)
        self._sent = np.full((num_slots, num_blocks), SCRATCH, dtype=np.int32)
        self._known: dict[int, tuple[Sequence[int], int]] = {}

    def update(self, held: Mapping[int, HeldPages]) -> None:
        """Point slots to the pages that their samples hold, and all others to `SCRATCH`."""
        changed: dict[int, Sequence[int]] = {slot: () for slot in self._known if slot not in held}
        for slot, (shared, own) in held.items():
            before, num_before = self._known.get(slot, ((), 0))
            # Who comes back gets another list, be it with as many pages.
            if before is not own or num_before != len(own):
                changed[slot] = (*shared, *own)
        self._known = {slot: (own, len(own)) for slot, (_, own) in held.items()}
        if changed:
            self._send(changed)

    def reset(self) -> None:
        """Point all slots to `SCRATCH`, here and on the device."""
        self.pages.fill_(SCRATCH)
        self._sent.fill(SCRATCH)
        self._known = {}

    def _send(self, changed: Mapping[int, Sequence[int]]) -> None:
        slots = np.fromiter(changed, dtype=np.int64)
        wanted = np.full((len(slots), self._sent.shape[1]), SCRATCH, dtype=np.int32)
        for row, pages in zip(wanted, changed.values(), strict=True):
            row[: len(pages)] = pages
        which, blocks = np.nonzero(wanted != self._sent[slots])
        if not which.size:  # the same pages have come back to the same slots
            return
        self._sent[slots] = wanted
        entries = np.stack([slots[which], blocks, wanted[which, blocks]])
        slot, block, page = without_waiting(torch.from_numpy(entries), self.pages.device)
        self.pages[slot, block] = page.int()
