"""The boundary between generation and training: groups in, the groups of a step out.

    rollouter                       buffer                          trainer
      put(group) as each ends --->    ended, by index     --->        take(step)
                                      running             --->        demands(step): prompts to draw

A policy decides which groups a step trains on and how many prompts to draw, by index in the data
order and policy version, never by arrival: so a run is a function of its seed in every mode.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from verl.protocol.trajectory import Group, Score
from verl.utils.environment import WentWrong

SEQUENCE_SCORES = ("score", "seq_reward", "seq_final_reward")
"""Names of a trajectory's own score; any other name is something that graders reported."""


@dataclass
class BufferState:
    """What a policy sees."""

    version: int = 0
    """Steps whose update is published."""

    num_drawn: int = 0
    """Prompts drawn since the run began; the next one gets this index."""

    running: dict[int, int] = field(default_factory=dict)
    """Index of each group that is still generated -> the step it was drawn at."""

    ended: dict[int, Group] = field(default_factory=dict)
    """Groups that no step has taken yet, by index."""

    def num_running(self, step: int) -> int:
        return sum(drawn_at == step for drawn_at in self.running.values())

    def ended_of(self, step: int) -> list[int]:
        """Indices of the groups drawn at `step` that have ended, in order."""
        return sorted(index for index, group in self.ended.items() if group.drawn_at == step)


class BufferPolicy(ABC):
    """Which groups belong to which step."""

    reads_grades: bool = False
    """Whether groups need their final scores before it can choose among them."""

    @abstractmethod
    def demand(self, step: int, state: BufferState) -> int | None:
        """Prompts to draw now; 0 if there are enough, None while that depends on running ones."""

    @abstractmethod
    def select(self, step: int, state: BufferState) -> list[int] | None:
        """Indices of the groups to train on, in the order of the batch; None while some run."""

    def discard(self, step: int, state: BufferState) -> list[int]:
        """Indices of groups that no step will train on, once `select` has had its choice."""
        return []

    def metrics(self, taken: "Taken") -> dict[str, float]:
        """What it reports about the groups of a step."""
        return {}


class OnPolicy(BufferPolicy):
    """A step trains on the prompts that were drawn for it, all of them."""

    def __init__(self, num_prompts: int) -> None:
        self.num_prompts = num_prompts

    def demand(self, step: int, state: BufferState) -> int | None:
        return self.num_prompts - state.num_running(step) - len(state.ended_of(step))

    def select(self, step: int, state: BufferState) -> list[int] | None:
        return None if state.num_running(step) else state.ended_of(step)


class TooFewGroups(WentWrong, ValueError):
    """The generation batches of a step gave too few prompts that teach something."""


class DynamicSampling(BufferPolicy):
    """Train where there is something to learn (DAPO, arXiv:2503.14476, section 3.2).

    A prompt whose trajectories all score alike has no advantage to learn from. A step trains on the
    first `num_prompts` groups, in data order, whose trajectories differ in `metric`; prompts are
    drawn `gen_batch_size` at a time until there are so many, at most `max_num_gen_batches` times
    (0: no limit). Scores are compared in single precision, in which rewards are kept.
    """

    reads_grades = True

    def __init__(
        self, num_prompts: int, gen_batch_size: int, metric: str, max_num_gen_batches: int
    ) -> None:
        self.num_prompts = num_prompts
        self.gen_batch_size = gen_batch_size
        self.metric = metric
        self.max_num_gen_batches = max_num_gen_batches

    def demand(self, step: int, state: BufferState) -> int | None:
        if state.num_running(step):
            return None
        num_drawn, num_kept = len(state.ended_of(step)), len(self._informative(step, state))
        if num_kept >= self.num_prompts:
            return 0
        num_batches = -(-num_drawn // self.gen_batch_size)
        if 0 < self.max_num_gen_batches <= num_batches:
            raise TooFewGroups(
                f"{num_batches} generation batches gave {num_kept} of {self.num_prompts} prompts "
                f"whose responses differ in {self.metric!r}; the task may be too easy or too hard "
                "for the policy. Raise algorithm.filter_groups.max_num_gen_batches (0 has no "
                "limit) or data.gen_batch_size, or look at the data"
            )
        return self.gen_batch_size

    def select(self, step: int, state: BufferState) -> list[int] | None:
        if state.num_running(step):
            return None
        return self._informative(step, state)[: self.num_prompts]

    def discard(self, step: int, state: BufferState) -> list[int]:
        return state.ended_of(step)

    def metrics(self, taken: "Taken") -> dict[str, float]:
        groups = [*taken.groups, *taken.discarded]
        num_dull = sum(g.fault is None and not self.is_informative(g) for g in groups)
        return {
            "train/num_gen_batches": len(groups) // self.gen_batch_size,
            "train/num_groups_dropped": num_dull,
        }

    def is_informative(self, group: Group) -> bool:
        """Whether trajectories differ in the metric; a single one always counts, a fault never."""
        if group.fault is not None:
            return False
        scores = [t.grade for t in group.last_rows if isinstance(t.grade, Score)]
        values = [self._value_of(score) for score in scores]
        return len(values) == 1 or len(set(values)) > 1

    def _value_of(self, score: Score) -> Any:
        if self.metric in SEQUENCE_SCORES and self.metric not in score.extras:
            return np.float32(score.value)
        return score.extras.get(self.metric)

    def _informative(self, step: int, state: BufferState) -> list[int]:
        groups = [state.ended[index] for index in state.ended_of(step)]
        scores = [t.grade for g in groups for t in g.last_rows if isinstance(t.grade, Score)]
        reported = dict.fromkeys(name for score in scores for name in score.extras)
        if scores and self.metric not in (*SEQUENCE_SCORES, *reported):
            known = ", ".join([*SEQUENCE_SCORES, *reported])
            raise ValueError(
                f"algorithm.filter_groups.metric is {self.metric!r}, but responses only have: "
                f"{known}"
            )
        return [group.index for group in groups if self.is_informative(group)]


class PreferredGroups(BufferPolicy):
    """Draw more prompts than a step trains on and prefer those of middling difficulty (PRIME,
    arXiv:2502.01456, section 3.3).

    A step draws `num_drawn` prompts once. First come groups whose mean accuracy lies within
    `accuracy_bounds` and none of whose responses has `max_response_tokens` or more, then others
    until there are `num_prompts`, both in data order. None turns a criterion off. Accuracy is what
    graders report as `acc`, else the score. A group with a fault is never taken.
    """

    reads_grades = True

    def __init__(
        self,
        num_prompts: int,
        num_drawn: int,
        *,
        accuracy_bounds: tuple[float, float] | None,
        max_response_tokens: int | None,
    ) -> None:
        self.num_prompts, self.num_drawn = num_prompts, num_drawn
        self.accuracy_bounds = accuracy_bounds
        self.max_response_tokens = max_response_tokens

    def demand(self, step: int, state: BufferState) -> int | None:
        if state.num_running(step):
            return None
        return 0 if state.ended_of(step) else self.num_drawn

    def select(self, step: int, state: BufferState) -> list[int] | None:
        if state.num_running(step):
            return None
        groups = [state.ended[index] for index in state.ended_of(step)]
        sound = [group for group in groups if group.fault is None]
        chosen = sorted(sound, key=self._is_second_choice)[: self.num_prompts]
        return sorted(group.index for group in chosen)

    def discard(self, step: int, state: BufferState) -> list[int]:
        return state.ended_of(step)

    def metrics(self, taken: "Taken") -> dict[str, float]:
        groups = [g for g in [*taken.groups, *taken.discarded] if g.fault is None]
        return {
            "train/num_groups_drawn": len(taken.groups) + len(taken.discarded),
            "train/num_groups_out_of_bounds": sum(not self.is_within_bounds(g) for g in groups),
            "train/num_groups_truncated": sum(self.is_truncated(g) for g in groups),
            "train/num_groups_filled_up": sum(map(self._is_second_choice, taken.groups)),
        }

    def is_within_bounds(self, group: Group) -> bool:
        if self.accuracy_bounds is None:
            return True
        low, high = self.accuracy_bounds
        grades = [t.grade for t in group.last_rows if isinstance(t.grade, Score)]
        accuracies = [float(grade.extras.get("acc", grade.value)) for grade in grades]
        return bool(accuracies) and low <= float(np.mean(accuracies)) <= high

    def is_truncated(self, group: Group) -> bool:
        limit = self.max_response_tokens
        return limit is not None and any(
            trajectory.num_response_tokens >= limit for trajectory in group.trajectories
        )

    def _is_second_choice(self, group: Group) -> bool:
        return not self.is_within_bounds(group) or self.is_truncated(group)


class Taken(NamedTuple):
    """The groups of a step, and those that were generated for it in vain."""

    groups: list[Group]
    discarded: list[Group]


class Buffer:
    """Groups on their way from generation to training; may be used from any thread."""

    def __init__(self, policy: BufferPolicy) -> None:
        self.policy = policy
        self._state = BufferState()
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def begin(self, num_prompts: int, *, step: int) -> range:
        """Count prompts as drawn at `step`; their indices."""
        with self._changed:
            indices = range(self._state.num_drawn, self._state.num_drawn + num_prompts)
            self._state.num_drawn += num_prompts
            self._state.running.update(dict.fromkeys(indices, step))
            return indices

    def put(self, group: Group) -> None:
        """All trajectories of the group have ended and are graded."""
        with self._changed:
            del self._state.running[group.index]
            self._state.ended[group.index] = group
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Generation has failed: whoever waits for groups gets the error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def demands(
        self, step: int, settle: Callable[[Sequence[Group]], None] | None = None
    ) -> Iterator[int]:
        """Numbers of prompts to draw; waits where the policy's answer depends on grades.

        `settle` sees each ended group once before the policy does.
        """
        settled: set[int] = set()
        while True:
            count = self._wait_for(lambda: self._demand(step, settled, settle), step)
            if isinstance(count, list):
                assert settle is not None
                settle(count)
                settled.update(group.index for group in count)
            elif count:
                yield count
            else:
                return

    def take(self, step: int, timeout_seconds: float | None = None) -> Taken:
        """The groups that the policy selects for `step`; waits until it can."""

        def select() -> Taken | None:
            chosen = self.policy.select(step, self._state)
            if chosen is None:
                return None
            groups = [self._state.ended.pop(index) for index in chosen]
            rest = self.policy.discard(step, self._state)
            return Taken(groups, [self._state.ended.pop(index) for index in rest])

        return self._wait_for(select, step, timeout_seconds)

    def drop(self, step: int) -> None:
        """Forget what has ended for a step that will not be made."""
        with self._changed:
            for index in self._state.ended_of(step):
                del self._state.ended[index]

    def publish(self, version: int) -> None:
        """The update of step `version` is visible to the engines."""
        with self._changed:
            self._state.version = version
            self._changed.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs; between steps these policies hold no groups."""
        with self._changed:
            assert not self._state.ended, "a checkpoint is taken when no group waits"
            num_running = len(self._state.running)  # they would be counted as drawn, and be lost
            assert not num_running, f"{num_running} groups are still generated"
            return {"num_drawn": self._state.num_drawn, "version": self._state.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._changed:
            self._state = BufferState(**state)

    def _demand(
        self, step: int, settled: set[int], settle: Callable[[Sequence[Group]], None] | None
    ) -> int | list[Group] | None:
        if settle is not None and not self._state.num_running(step):
            unsettled = set(self._state.ended_of(step)) - settled
            if unsettled:
                return [self._state.ended[index] for index in sorted(unsettled)]
        return self.policy.demand(step, self._state)

    def _wait_for(
        self, look: Callable[[], Any], step: int, timeout_seconds: float | None = None
    ) -> Any:
        """What `look` finds, once it is not None."""
        with self._changed:
            found: Any = None

            def is_settled() -> bool:
                nonlocal found
                found = None if self._error is not None else look()
                return found is not None or self._error is not None

            if not self._changed.wait_for(is_settled, timeout_seconds):
                raise TimeoutError(
                    f"step {step} waits for {self._state.num_running(step)} groups that are still "
                    f"generated after {timeout_seconds} s"
                )
            if self._error is not None:
                error, self._error = self._error, None
                self._state.running.clear()
                raise error
            return found
