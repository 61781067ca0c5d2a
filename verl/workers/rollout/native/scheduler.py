"""Which prompts enter the next step, and which slots they hold. No tensors.

A group is admitted as a whole: one slot for its prompt and one for each sample. Occupied slots are
kept dense (0 to n-1): when a sequence leaves, the last one moves into the gap, and the engine is
told which slots to copy. A step can then work on a plain slice of the cache. How much memory is
behind a slot, and which group is preempted when there is too little, is told in `pages`.
"""

import bisect
import itertools
from collections import deque
from dataclasses import dataclass

from verl.workers.rollout.native.pages import MemoryBudget
from verl.workers.rollout.native.sequence import Group, Sample
from verl.workers.rollout.native.sessions import SessionStore

MOST_CONVERSATIONS = 1 << 17
"""Of so many that nobody closed it is known when they began; turns of older ones count as new."""


@dataclass(frozen=True)
class Move:
    """Copy what slot `source` holds to slot `target`."""

    source: int
    target: int


class Scheduler:
    """First come, first served; a group that does not fit waits and those behind it wait too.

    A turn has come when its conversation began. Conversations that are open end before others
    begin, so that few keep keys and values at a time; if all took turns, memory that is too small
    for all would be taken from each before its next turn.
    """

    def __init__(self, num_slots: int, max_prefill_tokens: int, budget: MemoryBudget) -> None:
        self.num_slots = num_slots
        self.max_prefill_tokens = max_prefill_tokens
        self.budget = budget
        self._arrivals = itertools.count()
        self._begun: dict[str, int] = {}  # arrivals of conversations
        self.waiting: deque[Group] = deque()  # oldest first
        self.groups: list[Group] = []  # index is the prompt slot
        self.rows: list[Sample] = []  # index is the response slot

    @property
    def unfinished(self) -> list[Group]:
        """All groups here, running and waiting."""
        return [*self.groups, *self.waiting]

    @property
    def youngest(self) -> Group:
        """The running group that came last."""
        return max(self.groups, key=lambda group: group.arrival)

    def add(self, group: Group) -> None:
        assert len(group.samples) <= self.num_slots, "a group that never fits blocks the queue"
        now = next(self._arrivals)
        names = [sample.session_id for sample in group.samples if sample.session_id is not None]
        group.arrival = min((self._begun.setdefault(name, now) for name in names), default=now)
        while len(self._begun) > MOST_CONVERSATIONS:
            del self._begun[next(iter(self._begun))]
        self.requeue(group)

    def close_session(self, session_id: str) -> None:
        """Forget when a conversation began; an unknown one is no error."""
        self._begun.pop(session_id, None)

    def admit(self, sessions: SessionStore | None = None) -> list[Group]:
        """Give slots to as many waiting groups as fit; they are prefilled in this step.

        What is known of their prompts comes from `sessions` and is theirs from here on.
        """
        sessions = sessions or SessionStore(0)
        admitted: list[Group] = []
        tokens = 0
        if self.waiting:
            self.budget.begin_admission(self.rows)
        while self.waiting:
            group = self.waiting[0]
            self.budget.plan(group, sessions.find(group))
            if not self._fits(group, tokens):
                break
            self.waiting.popleft()
            tokens += group.num_prefill_tokens
            sessions.take(group)
            self.budget.admit(group)
            group.slot = len(self.groups)
            self.groups.append(group)
            for sample in group.unfinished:
                sample.slot = len(self.rows)
                self.rows.append(sample)
            admitted.append(group)
        return admitted

    def leave(self, sample: Sample) -> Move | None:
        """Free a sample's slot; the last row takes its place."""
        self.budget.release(sample)
        move = _fill_gap(sample.slot, len(self.rows))
        last = self.rows.pop()
        if move is not None:
            self.rows[move.target] = last
            last.slot = move.target
        sample.slot = -1
        return move

    def leave_group(self, group: Group) -> Move | None:
        """Free the prompt slot of a group whose samples have all left."""
        self.budget.release(group)
        move = _fill_gap(group.slot, len(self.groups))
        last = self.groups.pop()
        if move is not None:
            self.groups[move.target] = last
            last.slot = move.target
        group.slot = -1
        return move

    def withdraw(self, group: Group) -> None:
        """Take a group out of the queue, if it is still there."""
        if group in self.waiting:
            self.waiting.remove(group)

    def requeue(self, group: Group) -> None:
        """Wait, or wait again after it has left, behind groups that are as old or older."""
        bisect.insort(self.waiting, group, key=lambda waiting: waiting.arrival)

    def requeue_running(self) -> None:
        """All running groups give their slots back and wait again."""
        for group in self.groups:
            self.requeue(group)
        self._give_slots_back()

    def clear(self) -> None:
        """Forget everything."""
        self.waiting.clear()
        self._give_slots_back()
        self.budget.clear()  # whoever was admitted half-way included

    def _give_slots_back(self) -> None:
        for holder in (*self.rows, *self.groups):
            holder.slot = -1
            self.budget.release(holder)
        self.rows.clear()
        self.groups.clear()

    def _fits(self, group: Group, tokens: int) -> bool:
        # There are as many prompt slots as response slots, so these cannot run out first.
        if len(self.rows) + len(group.unfinished) > self.num_slots:
            return False
        is_first = tokens == 0  # a prompt longer than the budget runs alone
        if not is_first and tokens + group.num_prefill_tokens > self.max_prefill_tokens:
            return False
        return self.budget.fits(group)


def _fill_gap(gap: int, num_occupied: int) -> Move | None:
    last = num_occupied - 1
    return None if gap == last else Move(source=last, target=gap)
