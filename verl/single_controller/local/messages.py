"""What travels over the pipe between the driver and a worker process.

A message is a small header followed by the parcels it announces. The driver sends `Setup` once,
then `Request`s; the worker sends its `ProcessAddress` once, then one `Answer` per request, in their
order. `None` instead of a request asks the worker to end.
"""

from typing import Any, NamedTuple

from verl.single_controller.base.failures import Failure

CONSTRUCT = "__init__"
"""The method name of the first request, whose only parcel is a `ClassWithInitArgs`."""


class Setup(NamedTuple):
    variables: dict[str, str]
    """The whole environment of the rank."""

    driver_pid: int
    parent_pid: int
    """The driver, or its fork server."""

    dies_with_thread: bool
    """Whether the kernel may end the worker when the thread that started it ends."""

    preparation: dict[str, Any] | None
    """What `multiprocessing` makes a forked process like its driver with; None if it was spawned,
    which includes this."""


class Request(NamedTuple):
    number: int
    method: str
    num_args: int
    keywords: tuple[str, ...]
    """Names of the parcels that follow the positional ones."""

    @property
    def num_parcels(self) -> int:
        return self.num_args + len(self.keywords)


class Answer(NamedTuple):
    number: int
    failure: Failure | None
    """None when a parcel with the value follows."""
