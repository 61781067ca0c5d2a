"""Batches that workers are still computing, as results and as arguments.

`GroupFuture` is what a non-blocking call returns. On the driver it is waited for like a blocking
call: all ranks of the call are watched, and the first failure is raised at once.

As an argument a future is waited for by the back-end, not by the worker: `lay_out` puts its parts
beside the other arguments as keywords, in the form in which a back-end delivers references (Ray
resolves them, the local back-end forwards the packed answer), and on the worker `put_together`
joins them. So a worker never blocks on another one, and an error in a part fails the call before it
starts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl.protocol import DataProtoFuture
from verl.single_controller.base.backend import Call

PREFIX = "_part_of_future_"

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(eq=False)
class GroupFuture(DataProtoFuture):
    """A `DataProtoFuture` that knows its call. Sent elsewhere it is a plain one."""

    references: list[Any] | None = None
    """One per rank of the call; `futures` are those of them that hold parts of the batch."""

    positions: list[int] | None = None
    """Where `futures` are among `references`."""

    resolve: Callable[[list[Any], Call | None], list[Any]] | None = None
    call: Call | None = None

    def get(self, timeout_seconds: float | None = None) -> Any:
        """Wait, by default until the call's own deadline, join the parts and take the share."""
        assert self.references is not None
        assert self.positions is not None
        assert self.resolve is not None
        call = self.call
        if call is not None and timeout_seconds is not None:
            call = Call(call.group, call.method, timeout_seconds)
        values = self.resolve(self.references, call)
        batch = self.collect_fn([values[position] for position in self.positions])
        return batch if self.dispatch_fn is None else self.dispatch_fn(batch)

    def __reduce__(self) -> tuple[Any, ...]:
        return DataProtoFuture, (self.collect_fn, self.futures, self.dispatch_fn)


@dataclass(frozen=True)
class PartsOf:
    """Stands for a future whose parts arrive as keyword arguments."""

    future: DataProtoFuture
    names: tuple[str, ...]


def lay_out(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """On the driver: replace each future by its parts."""
    if not any(isinstance(arg, DataProtoFuture) for arg in (*args, *kwargs.values())):
        return args, kwargs
    parts: dict[str, Any] = {}

    def stand_in(arg: Any) -> Any:
        if not isinstance(arg, DataProtoFuture):
            return arg
        names = tuple(f"{PREFIX}{len(parts) + i}" for i in range(len(arg.futures)))
        parts.update(zip(names, arg.futures, strict=True))
        return PartsOf(DataProtoFuture(arg.collect_fn, [], arg.dispatch_fn), names)

    laid_out = tuple(stand_in(arg) for arg in args)
    keywords = {key: stand_in(arg) for key, arg in kwargs.items()}
    return laid_out, {**keywords, **parts}


def put_together(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """On the worker: replace each stand-in by the batch it stands for."""
    parts = {key: value for key, value in kwargs.items() if key.startswith(PREFIX)}
    if not parts:
        return args, kwargs

    def batch(arg: Any) -> Any:
        if not isinstance(arg, PartsOf):
            return arg
        whole = arg.future.collect_fn([parts[name] for name in arg.names])
        take_share = arg.future.dispatch_fn
        return whole if take_share is None else take_share(whole)

    own = {key: batch(value) for key, value in kwargs.items() if key not in parts}
    return tuple(batch(arg) for arg in args), own
