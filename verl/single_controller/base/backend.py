"""What a controller back-end supplies: start the ranks, run a method on them, stop them.

`Backend` is the whole contract. It knows ranks, method names and arguments; it knows nothing of
dispatch modes, batches or errors' wording, which `WorkerGroup` and `answers` add on top and which
are therefore the same for every back-end. A back-end is shared by all views of a group (`spawn`,
`with_deadline`) and ends when the last of them is gone, at `shutdown`, or when the interpreter
exits.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from verl.single_controller.base.failures import Failure

DEFAULT_CALL_TIMEOUT_SECONDS = 3600.0
"""Longer than the longest single stage seen in practice (half-hour rollouts, checkpoint saves), so
that it never ends healthy work; collectives inside a worker have their own, shorter limits."""


@dataclass(frozen=True)
class Call:
    """One call of a group: who calls what, and until when an answer is of use."""

    group: str
    method: str
    timeout_seconds: float
    started: float = field(default_factory=time.monotonic)
    """On the monotonic clock, so that a jump of the wall clock changes nothing."""

    @property
    def deadline(self) -> float:
        return self.started + self.timeout_seconds

    def remaining_seconds(self) -> float:
        return self.deadline - time.monotonic()


class Share(NamedTuple):
    """What one rank gets of a call."""

    rank: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Outcome(NamedTuple):
    """What one rank answered: a value, or why there is none."""

    value: Any = None
    failure: Failure | None = None


class Backend(ABC):
    """The ranks of one group. Methods other than `shutdown` may be called from several threads."""

    workers: list[Any]
    """One handle per rank, for users who want to look behind the group."""

    reference_type: type
    """The type of what `submit` gives."""

    is_this_process: bool = False
    """Whether the only rank is the calling process, so that it has `run_here`."""

    probe_seconds: float = 5.0
    """How often to look for stopped ranks during a long wait."""

    def __init__(self) -> None:
        self.is_closed = threading.Event()

    @property
    def world_size(self) -> int:
        return len(self.workers)

    @abstractmethod
    def submit(self, call: Call, method: str, shares: Sequence[Share]) -> list[Any]:
        """Start `method` on each share's rank and return one reference per share.

        Does not wait for the method, except where the rank is this very process. An object that
        several shares hold is transported once. A rank that is known to be dead gives a reference
        that has already failed.
        """

    def method_here(self, role: str, name: str) -> Callable[..., Any]:
        """A method of a role's worker in this process."""
        raise NotImplementedError(f"{type(self).__name__} has no rank in this process")

    def run_here(self, call: Call, function: Callable[..., Any], share: Share) -> Any:
        """Call a function on the calling thread, within the call's deadline; its reference."""
        raise NotImplementedError(f"{type(self).__name__} has no rank in this process")

    @abstractmethod
    def wait(self, references: Sequence[Any], timeout_seconds: float) -> list[int]:
        """Positions of the references that have an outcome; waits until there is at least one."""

    @abstractmethod
    def outcomes(self, references: Sequence[Any]) -> list[Outcome]:
        """What came of references that `wait` has named."""

    @abstractmethod
    def stopped_ranks(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` whose process exists but is stopped by a signal, so it cannot answer."""

    @abstractmethod
    def stack_of(self, rank: int) -> str:
        """Where a silent rank is: its Python stack, or the best that can be told."""

    @abstractmethod
    def dead_ranks(self) -> list[int]:
        """Ranks whose process is known to have ended."""

    @abstractmethod
    def label(self, rank: int) -> str:
        """How messages name a rank, as in `rank 1 (pid 4711)`."""

    @abstractmethod
    def shutdown(self) -> None:
        """Set `is_closed` and end the ranks started here. Bounded; may be called again."""

    def share(self, parts: list[Any]) -> list[Any]:
        """Make each part cheap to give to several ranks of one call."""
        return parts
