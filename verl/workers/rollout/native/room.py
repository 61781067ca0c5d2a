"""Whether there is memory for who wants to enter, and for those who run to go on. No tensors.

With slots (`SlotRoom`) a sequence has room for its longest response from the start: there is
nothing to decide. With pages (`PagedRoom`) a prompt holds those of its whole blocks, and each of
its continuations those of what follows, as many as it has come to need.

Who enters. A group enters if there are pages for what it brings and then still enough for a stretch
of every running sequence, its own included: what the next steps may write. No more is kept for
those who run. Nobody knows how long responses become, and to compute some tokens again costs less
than to leave memory empty: a prefill is faster than the steps that gave them.

Who gives way. If pages run out, the group that came last gives its own back and waits, first in the
queue, until it fits again (`Scheduler.youngest`).

Everybody finishes. `most_samples` keeps groups so small that the longest responses of one fit into
all pages. Running groups came before all that wait, since the queue lets in the oldest and only the
youngest gives way. So the oldest group runs as soon as the engine steps: no other runs without it,
and where nobody runs it fits. It never gives way: a younger group would, and if there is none, it
has all the pages it can need. Each step gives its samples tokens, of which there are finitely many;
then the next group is the oldest.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from verl.workers.rollout.native.page_pool import PAGE, PagePool, pages_for
from verl.workers.rollout.native.sequence import Group, Sample


class Room(ABC):
    """Memory for keys and values, as the scheduler sees it."""

    @abstractmethod
    def most_samples(self, prompt_tokens: int, max_tokens: int) -> int:
        """How large a group may be, given the lengths of its prompt and of its responses."""

    @abstractmethod
    def most_shared(self, prompt_tokens: int) -> int:
        """How much of a prompt of that length can be kept once for all samples."""

    @abstractmethod
    def look_around(self, rows: Sequence[Sample]) -> None:
        """See who runs, before groups are asked for by `fits`."""

    @abstractmethod
    def fits(self, group: Group) -> bool:
        """Whether a group may enter beside those who run and those who have just entered."""

    @abstractmethod
    def enter(self, group: Group) -> None:
        """Take what a group's prompt and what its unfinished samples need at first."""

    @abstractmethod
    def leave(self, holder: Group | Sample) -> None:
        """Give back what a group or a sample holds."""

    @abstractmethod
    def clear(self) -> None:
        """Everybody gives everything back."""


class SlotRoom(Room):
    """Whoever has a row has a slot, and a slot is long enough."""

    def __init__(self, num_rows: int, slot_tokens: int) -> None:
        """`slot_tokens` is the length of a prompt slot."""
        self.num_rows = num_rows
        self.slot_tokens = slot_tokens

    def most_samples(self, prompt_tokens: int, max_tokens: int) -> int:
        return self.num_rows

    def most_shared(self, prompt_tokens: int) -> int:
        return self.slot_tokens

    def look_around(self, rows: Sequence[Sample]) -> None:
        pass

    def fits(self, group: Group) -> bool:
        return True

    def enter(self, group: Group) -> None:
        pass

    def leave(self, holder: Group | Sample) -> None:
        pass

    def clear(self) -> None:
        pass


class PagedRoom(Room):
    """Pages for prompts and continuations; holders are groups and samples."""

    def __init__(self, num_pages: int, *, num_rows: int, max_tokens: int, stretch: int) -> None:
        """`max_tokens` bounds a sequence, `stretch` what the next steps may add to it."""
        self.pool = PagePool(num_pages)
        self.num_rows = num_rows
        self.max_tokens = max_tokens
        self._stretch = pages_for(stretch)
        self._vacancy = 0

    def most_samples(self, prompt_tokens: int, max_tokens: int) -> int:
        shared = self.most_shared(prompt_tokens)
        longest = min(prompt_tokens + max_tokens, self.max_tokens) - shared
        num_pages = self.pool.capacity - pages_for(shared)
        return max(1, min(self.num_rows, num_pages // max(1, pages_for(longest))))

    def most_shared(self, prompt_tokens: int) -> int:
        """Whole blocks: the rest shares its block, and so its page, with each response."""
        return prompt_tokens - prompt_tokens % PAGE

    def look_around(self, rows: Sequence[Sample]) -> None:
        kept = sum(self._growth(row, len(self.pool.held(row))) for row in rows)
        self._vacancy = self.pool.num_free - kept

    def fits(self, group: Group) -> bool:
        return self._price(group) <= self._vacancy

    def enter(self, group: Group) -> None:
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

    def leave(self, holder: Group | Sample) -> None:
        self.pool.give_back(holder)

    def clear(self) -> None:
        self.pool.clear()

    def pages_of(self, sample: Sample) -> list[int]:
        """Those of the prompt, then its own: page k holds the tokens from k * `PAGE` on."""
        return [*self.pool.held(sample.group), *self.pool.held(sample)]

    def _price(self, group: Group) -> int:
        """Pages that a group takes when it enters, and a stretch for each sample."""
        own = [(sample, pages_for(sample.num_own + 1)) for sample in group.unfinished]
        shared = pages_for(group.num_shared)
        return shared + sum(number + self._growth(sample, number) for sample, number in own)

    def _growth(self, sample: Sample, num_held: int) -> int:
        """Pages to be kept for a sample that holds so many: no more than it may ever need."""
        most = pages_for(self._own_tokens(sample, sample.group.token_limit))
        return min(self._stretch, most - num_held)

    def _own_tokens(self, sample: Sample, num_tokens: int) -> int:
        """Of its own pages, if its response has so many tokens, or the most it may have."""
        group = sample.group
        return len(group.prompt_ids) - group.num_shared + min(num_tokens, group.token_limit)
