"""Rows are read and tokenized while the step before them trains.

    this thread             reading thread
      take 1   ---------->    read 1
      train on 1              read 2
      take 2                  ...
      train on 2              read 3

Which rows a step has follows from its number, so reading ahead changes nothing else. One thread
reads everything, held-out rows too: tokenizers and datasets need not bear two at a time.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

from tensordict import TensorDict

from verl.utils.dataset.tables import DataError

Read = Callable[[], TensorDict]
MAX_SECONDS = 1800.0
"""For one batch; a dataset that takes longer is taken to be stuck."""


class RowReader:
    """`take` gives a batch and has the next one read; what reading raises is raised there."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rows")
        self._ahead: dict[int, Future[TensorDict]] = {}

    def take(self, number: int, read: Callable[[int], TensorDict], last: int) -> TensorDict:
        """Batch `number`, as `read` gives it; the next one is begun unless this is the last."""
        wanted = self._ahead.pop(number, None) or self._thread.submit(read, number)
        self._ahead = {} if number >= last else {number + 1: self._thread.submit(read, number + 1)}
        return _read(wanted)

    def each(self, reads: Iterable[Read]) -> Iterator[TensorDict]:
        """What each of them gives, one read ahead."""
        ahead: Future[TensorDict] | None = None
        for read in reads:
            ready, ahead = ahead, self._thread.submit(read)
            if ready is not None:
                yield _read(ready)
        if ahead is not None:
            yield _read(ahead)


def _read(batch: "Future[TensorDict]") -> TensorDict:
    done, _ = wait([batch], timeout=MAX_SECONDS)
    if not done:
        raise DataError(
            f"reading a batch has taken {MAX_SECONDS:g} s and is not done; the dataset is stuck, "
            "on a file or a service that does not answer"
        )
    return batch.result(timeout=0)
