"""Rows are read and tokenized while the step before them trains.

    this thread             reading threads
      take 1   ---------->    read 1
      train on 1              read 2
      take 2                  ...
      train on 2              read 3

Which rows a step has follows from its number, so reading ahead changes nothing else. A read begins
when the one before it has ended, that of held-out rows too: tokenizers and datasets need not bear
two at a time. The threads are daemons, so a dataset that is stuck does not keep the program alive.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from functools import partial

from tensordict import TensorDict

from verl.utils.dataset.tables import DataError

Read = Callable[[], TensorDict]
Batch = Future[TensorDict]

MAX_SECONDS = 1800.0
"""For one batch; a dataset that takes longer is taken to be stuck."""

CLOSE_SECONDS = 60.0


class RowReader:
    """`take` gives a batch and has the next one read; what reading raises is raised there."""

    def __init__(self) -> None:
        self._ahead: dict[int, Batch] = {}
        self._newest: Batch | None = None

    def take(self, number: int, read: Callable[[int], TensorDict], last: int) -> TensorDict:
        """Batch `number`, as `read` gives it; the next one is begun unless this is the last."""
        wanted = self._ahead.pop(number, None) or self._begin(partial(read, number))
        self._ahead = {} if number >= last else {number + 1: self._begin(partial(read, number + 1))}
        return _ended(wanted)

    def each(self, reads: Iterable[Read]) -> Iterator[TensorDict]:
        """What each of them gives, one read ahead."""
        ahead: Batch | None = None
        for read in reads:
            ready, ahead = ahead, self._begin(read)
            if ready is not None:
                yield _ended(ready)
        if ahead is not None:
            yield _ended(ahead)

    def close(self) -> None:
        """Let a read that nobody wants any more end: one that is cut off may abort the program."""
        if self._newest is not None:
            wait([self._newest], timeout=CLOSE_SECONDS)

    def _begin(self, read: Read) -> Batch:
        before, self._newest = self._newest, Future()
        arguments = (read, before, self._newest)
        threading.Thread(target=_run, args=arguments, name="rows", daemon=True).start()
        return self._newest


def _run(read: Read, before: Batch | None, batch: Batch) -> None:
    try:
        if before is not None:
            wait([before], timeout=MAX_SECONDS)
        batch.set_result(read())
    except BaseException as error:  # whoever wants the batch raises it
        batch.set_exception(error)


def _ended(batch: Batch) -> TensorDict:
    done, _ = wait([batch], timeout=MAX_SECONDS)
    if not done:
        raise DataError(
            f"reading a batch has taken {MAX_SECONDS:g} s and is not done; the dataset is stuck, "
            "on a file or a service that does not answer"
        )
    return batch.result(timeout=0)
