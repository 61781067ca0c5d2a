"""What can go wrong with a worker, as exceptions that name the rank, the method and the cause.

A back-end tells what happened on one rank as a `Failure`. `failure_error` turns the failures of one
call into one exception: a death comes before an exception (a killed rank makes its peers raise),
then the first in time; the others are summarised, so the cause is never hidden by its echo.
"""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

CONTROLLER_FOLDER = str(Path(__file__).parents[1])


class WorkerError(RuntimeError):
    """A worker's method raised; `__cause__` is the worker's own exception where it could travel."""

    group: str = ""
    method: str = ""
    ranks: tuple[int, ...] = ()
    """The ranks that failed, the cause first."""


class WorkerDied(WorkerError):
    """A worker's process ended while it was needed."""


class WorkerTimeout(WorkerError):
    """Some ranks had not answered when the call's deadline passed, or were found stopped."""


Described = TypeVar("Described", bound=WorkerError)


@dataclass(frozen=True)
class Failure:
    """What happened on one rank."""

    summary: str
    """One line, as in `ValueError: no rows` or `killed by SIGKILL`."""

    traceback: str = ""
    cause: BaseException | None = None
    is_death: bool = False


SHUT_DOWN = Failure("the worker group was shut down", is_death=True)


class Guard:
    """The one boundary where whatever a worker's code raises is caught, to be told to the driver.

        with Guard() as guard:
            value = method()
        guard.failure  # None when nothing was raised

    Only `Exception` is caught: `SystemExit` and `KeyboardInterrupt` end the process.
    """

    def __init__(self) -> None:
        self.failure: Failure | None = None

    def __enter__(self) -> "Guard":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.failure = Failure(
            summary=summary_of(error),
            traceback="".join(traceback.format_exception(kind, error, _from_user_code(trace))),
            cause=error,
        )
        return True


def _from_user_code(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames of the controller that lead to the worker's own code."""
    own = trace
    while own is not None and own.tb_frame.f_code.co_filename.startswith(CONTROLLER_FOLDER):
        own = own.tb_next
    return own or trace


def summary_of(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def failure_error(
    group: str,
    method: str,
    failures: Mapping[int, Failure],
    labels: Mapping[int, str],
    silent: list[int],
) -> WorkerError:
    """One exception for all `failures` (rank -> what happened, in the order they became known)."""
    ranks = sorted(failures, key=lambda rank: not failures[rank].is_death)  # stable: time within
    first = failures[ranks[0]]
    kind = WorkerDied if first.is_death else WorkerError
    verb = "died" if first.is_death else "raised"
    lines = [f"worker group {group!r}, {method}: {labels[ranks[0]]} {verb}: {first.summary}"]
    if first.traceback:
        lines += [f"traceback of {labels[ranks[0]]}:", first.traceback.rstrip()]
    if len(ranks) > 1:
        lines += ["then also:"]
        lines += [f"  {labels[rank]}: {first_line(failures[rank].summary)}" for rank in ranks[1:]]
    if silent:
        lines += [f"no answer yet from {ranks_text(silent)}"]
    error = described(kind("\n".join(lines)), group, method, ranks)
    error.__cause__ = first.cause
    return error


def timeout_error(
    group: str, method: str, timeout_seconds: float, labels: Mapping[int, str], reason: str
) -> WorkerTimeout:
    """`labels` has a label for each silent rank, followed by its stack if known."""
    lines = [f"worker group {group!r}, {method}: {reason}"]
    lines += [f"no answer from {ranks_text(list(labels))} (deadline {timeout_seconds:g} s)"]
    lines += list(labels.values())
    return described(WorkerTimeout("\n".join(lines)), group, method, list(labels))


def described(error: Described, group: str, method: str, ranks: list[int]) -> Described:
    error.group, error.method, error.ranks = group, method, tuple(ranks)
    return error


def ranks_text(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def first_line(text: str) -> str:
    return text.partition("\n")[0]
