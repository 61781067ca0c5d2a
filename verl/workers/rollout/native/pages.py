"""The memory budget for keys and values: admission, preemption, and pages.

With slots (`SlotBudget`) a sequence has memory for its longest response from the start: there is
nothing to decide. With pages (`PageBudget`) a prompt holds those of its whole blocks, and each of
its samples those of what follows, as many as it has come to need. A page holds `PAGE` consecutive
tokens of one sequence, in every layer.

Admission. A group is admitted if there are pages for what it brings and then still enough for the
lookahead of every running sequence, its own included: what the next steps may write. No more is
kept back. Nobody knows how long responses become, and recomputing some tokens costs less than
leaving memory empty: a prefill is faster than the steps that gave them.

Preemption. If pages run out, the youngest running group frees its own and waits until it fits again
(`Scheduler.youngest`).

Progress. `most_samples` keeps groups so small that the longest responses of one fit into all pages.
The queue admits the oldest first. If the oldest group of all waits, as a turn of a conversation
that began before those that run, nobody is admitted before it: those that run end, since each step
gives the oldest of them tokens, of which there are finitely many; and where none runs it fits. Once
it runs it is never preempted: a younger group would be, and if there is none, it has all the pages
it can need. So it ends; then the next group is the oldest.

Sessions. With kernels (`KernelBudget`) a sequence that ends leaves its memory to its session
(`keep`), and the next turn of the session takes it over when it is admitted: nothing is copied.
There is memory for running sequences and some more (`num_kept`) for sessions that wait, which may
also hold what no running sequence uses. Where memory is short the least recently used session loses
its own first (`evict`), so sessions never keep a sequence from being admitted or from growing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import torch

from verl.utils.device import without_waiting
from verl.workers.rollout.native.sequence import Group, IdleHolder, KeptMemory, KnownTokens, Sample

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

    def plan(self, group: Group, known: KnownTokens) -> None:
        """Note what is known of a group that may be admitted, as far as it can be used, and which
        part of its prompt is then shared."""
        group.num_shared = min(len(group.prompt_ids), self.most_shared(len(group.prompt_ids)))
        group.known = known

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
    def release(self, holder: Group | Sample | KeptMemory) -> None:
        """Give back what a group, a sample or a session holds."""

    @abstractmethod
    def clear(self) -> None:
        """Everybody gives everything back."""

    @abstractmethod
    def usage(self, num_rows: int) -> float:
        """Share of the memory that is held, from 0 to 1, while so many rows run."""


class SlotBudget(MemoryBudget):
    """Admission in plain torch: a row has the slot of its number, and a slot is long enough."""

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

    def release(self, holder: Group | Sample | KeptMemory) -> None:
        pass

    def clear(self) -> None:
        pass

    def usage(self, num_rows: int) -> float:
        return num_rows / self.num_rows


class KernelBudget(MemoryBudget):
    """Memory that sessions hold between their turns; `prompts` and `pool` may be one pool.

    Groups hold some of `prompts`, samples some of `pool`.
    """

    def __init__(self, prompts: "PagePool", pool: "PagePool") -> None:
        self.prompts = prompts
        self.pool = pool
        self.evict: Callable[[], bool] = lambda: False
        """Drops what the least recently used session holds; False if there is none."""

    @abstractmethod
    def slot_of(self, sample: Sample) -> int:
        """The slot of the cache, or the line of the page table, of a sample."""

    def prompt_slot_of(self, group: Group) -> int:
        """The prompt slot, or the first page, of a group; `SCRATCH` if it has none."""
        held = self.prompts.held(group)
        return held[0] if held else SCRATCH

    def keep(self, sample: Sample) -> KeptMemory:
        """Leave the memory of a sample that ends to its session."""
        kept = KeptMemory(num_shared=sample.group.num_shared)
        self.prompts.share(sample.group, kept.shared)
        self.pool.hand_over(sample, kept.own, self._num_kept(sample))
        return kept

    @abstractmethod
    def _num_kept(self, sample: Sample) -> int:
        """How much of its own memory the tokens of a sample fill."""

    def release(self, holder: Group | Sample | KeptMemory) -> None:
        if isinstance(holder, KeptMemory):
            self.prompts.free(holder.shared)
            self.pool.free(holder.own)
        else:
            (self.prompts if isinstance(holder, Group) else self.pool).free(holder)

    def clear(self) -> None:
        self.prompts.clear()
        self.pool.clear()

    def usage(self, num_rows: int) -> float:
        return 1 - self.pool.num_free / self.pool.capacity

    def _take(self, pool: "PagePool", holder: Hashable, number: int) -> None:
        """Sessions give way to sequences that run."""
        while pool.num_free < number and self.evict():
            pass
        pool.take(holder, number)


class SlotPoolBudget(KernelBudget):
    """A slot for every row, and `num_kept` more for sessions; slot `SCRATCH` is nobody's."""

    def __init__(
        self, num_rows: int, num_kept: int, *, prompt_tokens: int, response_tokens: int
    ) -> None:
        """With the lengths of prompt slots and of response slots."""
        super().__init__(*(PagePool(1 + num_rows + num_kept) for _ in range(2)))
        self.num_rows = num_rows
        self.prompt_tokens = prompt_tokens
        self.response_tokens = response_tokens

    def most_samples(self, prompt_tokens: int, max_tokens: int) -> int:
        return self.num_rows

    def most_shared(self, prompt_tokens: int) -> int:
        return self.prompt_tokens

    def slot_of(self, sample: Sample) -> int:
        return self.pool.held(sample)[0]

    def _num_kept(self, sample: Sample) -> int:
        return 1

    def plan(self, group: Group, known: KnownTokens) -> None:
        """A turn goes on in the slots of its session if its own is long enough for the rest; if
        not, what is known is copied to others (`KeptMemory.moved_from`)."""
        super().plan(group, known)
        if known.kept is not None:
            num_shared = min(known.kept.num_shared, len(known.token_ids))
            if len(group.prompt_ids) + group.token_limit - num_shared <= self.response_tokens:
                group.num_shared = num_shared

    def begin_admission(self, rows: Sequence[Sample]) -> None:
        pass

    def fits(self, group: Group) -> bool:
        return True

    def admit(self, group: Group) -> None:
        """A prompt slot can be had whenever a response slot can: whoever holds one of those holds a
        response slot as well, or has a sample that does."""
        kept = group.known.kept
        if kept is not None:
            if group.num_shared == min(kept.num_shared, len(group.known.token_ids)):
                self.prompts.hand_over(kept.shared, group)
                self.pool.hand_over(kept.own, group.samples[0])
                self.release(kept)
                return
            kept.moved_from = (self.prompts.held(kept.shared)[0], self.pool.held(kept.own)[0])
            self.release(kept)
        for sample in group.unfinished:
            self._take(self.pool, sample, 1)
        self._take(self.prompts, group, 1)


class PageBudget(KernelBudget):
    """Pages for prompts and continuations, `num_kept` of them beside those of running sequences."""

    def __init__(
        self, num_pages: int, *, num_rows: int, max_tokens: int, lookahead: int, num_kept: int = 0
    ) -> None:
        """`max_tokens` bounds a sequence, `lookahead` what the next steps may add to it."""
        pool = PagePool(num_pages)
        super().__init__(pool, pool)
        self.capacity = pool.capacity - num_kept  # of running sequences
        self.lines = PagePool(1 + num_rows)
        self.num_rows = num_rows
        self.max_tokens = max_tokens
        self._lookahead = pages_for(lookahead)
        self._vacancy = 0

    def most_samples(self, prompt_tokens: int, max_tokens: int) -> int:
        shared = self.most_shared(prompt_tokens)
        longest = min(prompt_tokens + max_tokens, self.max_tokens) - shared
        num_pages = self.capacity - pages_for(shared)
        return max(1, min(self.num_rows, num_pages // max(1, pages_for(longest))))

    def most_shared(self, prompt_tokens: int) -> int:
        """Whole blocks: the rest shares its block, and so its page, with each response."""
        return prompt_tokens - prompt_tokens % PAGE

    def slot_of(self, sample: Sample) -> int:
        return self.lines.held(sample)[0]

    def _num_kept(self, sample: Sample) -> int:
        return pages_for(sample.num_own)

    def plan(self, group: Group, known: KnownTokens) -> None:
        """A page that other sequences share is not written to: whoever turns off inside one
        computes its tokens again."""
        super().plan(group, known)
        if known.kept is None:
            return
        num_known, num_shared = len(known.token_ids), known.kept.num_shared
        if num_known < num_shared:
            num_known = num_shared = num_known - num_known % PAGE
        if num_known:
            group.num_shared = num_shared
        group.known = known.prefix(num_known)

    def begin_admission(self, rows: Sequence[Sample]) -> None:
        ahead = sum(self._growth(row, len(self.pool.held(row))) for row in rows)
        self._vacancy = self.capacity - self.pool.num_busy - ahead

    def fits(self, group: Group) -> bool:
        return self._price(group) <= self._vacancy

    def admit(self, group: Group) -> None:
        self._vacancy -= self._price(group)
        kept = group.known.kept
        if kept is not None:
            self.pool.hand_over(kept.shared, group, pages_for(group.num_shared))
            if len(group.known.token_ids) >= kept.num_shared:
                (sample,) = group.samples
                self.pool.hand_over(kept.own, sample, pages_for(sample.num_own + 1))
            self.release(kept)
        else:
            self._take(self.pool, group, pages_for(group.num_shared))
        for sample in group.unfinished:
            self.lines.take(sample, 1)
            missing = pages_for(sample.num_own + 1) - len(self.pool.held(sample, ()))
            self._take(self.pool, sample, missing)

    def grow(self, rows: Sequence[Sample], reach: Sequence[int]) -> bool:
        """Give rows pages for so many response tokens; False, and none, if there are too few."""
        missing = [
            pages_for(self._own_tokens(row, num_tokens)) - len(self.pool.held(row))
            for row, num_tokens in zip(rows, reach, strict=True)
        ]
        if sum(number for number in missing if number > 0) > self.capacity - self.pool.num_busy:
            return False
        for row, number in zip(rows, missing, strict=True):
            if number > 0:
                self._take(self.pool, row, number)
        return True

    def release(self, holder: Group | Sample | KeptMemory) -> None:
        super().release(holder)
        if isinstance(holder, Sample):
            self.lines.free(holder)

    def clear(self) -> None:
        super().clear()
        self.lines.clear()

    def pages_of(self, sample: Sample) -> list[int]:
        """Those of the prompt, then its own: page k holds the tokens from k * `PAGE` on."""
        return [*self.pool.held(sample.group), *self.pool.held(sample)]

    def _price(self, group: Group) -> int:
        """Pages that a group takes when it is admitted, and the lookahead of each sample."""
        own = [(sample, pages_for(sample.num_own + 1)) for sample in group.unfinished]
        shared, kept = pages_for(group.num_shared), group.known.kept
        if kept is not None:  # some of them other sequences use already
            shared = self.pool.num_idle(self.pool.held(kept.shared)[:shared])
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
    """`num_pages` pages, or slots, `SCRATCH` among them. A page may have several holders."""

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

    def num_idle(self, pages: Sequence[int]) -> int:
        """How many of these are held by sessions at most."""
        return sum(not self._num_busy_holders[page] for page in pages)

    def take(self, holder: Hashable, num_pages: int) -> None:
        """Give somebody more pages, behind those that it has; there must be so many."""
        assert 0 <= num_pages <= self.num_free, f"{num_pages} of {self.num_free} pages are wanted"
        pages = [self._free.pop() for _ in range(num_pages)]
        self._count(pages, holder, 1)
        self._held.setdefault(holder, []).extend(pages)

    def held(self, holder: Hashable, default: Sequence[int] | None = None) -> Sequence[int]:
        """The pages of somebody who has taken some, in the order in which they were taken.

        It is the same object until they are given back, and grows with them.
        """
        return self._held[holder] if default is None else self._held.get(holder, default)

    def share(self, source: Hashable, target: Hashable) -> None:
        """Let `target` hold what `source` holds."""
        pages = self._held[target] = list(self._held[source])
        self._count(pages, target, 1)

    def hand_over(self, source: Hashable, target: Hashable, most: int | None = None) -> None:
        """Let `target` hold what `source` held, the first `most` pages; nobody has the rest."""
        pages = self._held[source]
        self._held[source], self._held[target] = pages[len(pages) if most is None else most :], []
        moved = pages[: len(pages) - len(self._held[source])]
        self._count(moved, target, 1)
        self._count(moved, source, -1)
        self._held[target] += moved
        self.free(source)
        self._held[source] = []

    def free(self, holder: Hashable) -> None:
        """All that somebody has taken; it must have."""
        self._count(self._held.pop(holder), holder, -1)

    def clear(self) -> None:
        """Free all pages."""
        self._held: dict[Hashable, list[int]] = {}
        self._num_holders = [0] * self.num_pages
        self._num_busy_holders = [0] * self.num_pages
        self.num_busy = 0
        """Pages that somebody holds who is no session."""
        self._free = [page for page in reversed(range(self.num_pages)) if page != SCRATCH]

    def _count(self, pages: Sequence[int], holder: Hashable, change: int) -> None:
        is_busy = not isinstance(holder, IdleHolder)
        for page in pages:
            self._num_holders[page] += change
            if is_busy:
                was_busy = self._num_busy_holders[page] > 0
                self._num_busy_holders[page] += change
                self.num_busy += (self._num_busy_holders[page] > 0) - was_busy
            if not self._num_holders[page]:
                self._free.append(page)


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

    def update(self, held: Mapping[int, HeldPages], *, keeps_others: bool = False) -> None:
        """Point slots to the pages that their samples hold, and all others to `SCRATCH`."""
        changed: dict[int, Sequence[int]] = {}
        if not keeps_others:
            changed = {slot: () for slot in self._known if slot not in held}
        for slot, (shared, own) in held.items():
            before, num_before = self._known.get(slot, ((), 0))
            # Who comes back gets another list, be it with as many pages.
            if before is not own or num_before != len(own):
                changed[slot] = (*shared, *own)
        known = {slot: (own, len(own)) for slot, (_, own) in held.items()}
        self._known = self._known | known if keeps_others else known
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
