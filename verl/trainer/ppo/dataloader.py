"""`PromptLoader`: batches of rows, and the exact place in the data at which the next one begins.

The place is (epoch, rows taken in it), and it moves when a batch is handed out. A checkpoint taken
after a step therefore names the first row that no step has seen, at the end of an epoch too.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import Dataset, Sampler

from verl.utils.dataset.rl_dataset import collate_fn as default_collate_fn
from verl.utils.dataset.sampler import EpochSampler

Rows = dict[str, Any]


class EndOfData(Exception):
    """All epochs are over."""


@runtime_checkable
class StatefulSampler(Protocol):
    """A sampler that continues by itself where it was, rather than being wound forward."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class PromptLoader:
    """Draws rows of `dataset` in the order of `sampler`, `batch_size` at a time.

    With `drop_last` an epoch ends when fewer rows are left than a batch has. Iterating gives the
    batches of the current epoch; `next_batch` goes on into the next one, up to `max_epochs`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: Sampler[int],
        batch_size: int,
        collate_fn: Callable[[Sequence[Any]], Rows] | None = None,
        *,
        drop_last: bool = True,
        max_epochs: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.batch_size = batch_size
        self.collate_fn = collate_fn or default_collate_fn
        self.drop_last = drop_last
        self.max_epochs = max_epochs
        self.epoch = 0
        self.position = 0
        self._order: Iterator[int] | None = None
        if not len(self):
            raise ValueError(
                f"the data has {self.num_rows} rows and a batch needs {batch_size}; lower "
                "data.train_batch_size or add rows"
            )

    @property
    def num_rows(self) -> int:
        return len(self.sampler)  # pyright: ignore[reportArgumentType]

    def __len__(self) -> int:
        """Batches per epoch."""
        full, rest = divmod(self.num_rows, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Rows]:
        if not self._has_batch():
            self._next_epoch()
        while self._has_batch():
            yield self._take()
        self._next_epoch()

    def next_batch(self) -> Rows:
        if not self._has_batch():
            self._next_epoch()
        if self.max_epochs is not None and self.epoch >= self.max_epochs:
            raise EndOfData(f"all {self.max_epochs} epochs of the data are used")
        return self._take()

    def state_dict(self) -> dict[str, Any]:
        own = self.sampler.state_dict() if isinstance(self.sampler, StatefulSampler) else None
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_rows": self.num_rows,
            "sampler": own,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["num_rows"] != self.num_rows:
            raise ValueError(
                f"the data had {state['num_rows']} rows when the run was saved and has "
                f"{self.num_rows} now; continue with the same files and filters"
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = None
        if isinstance(self.sampler, StatefulSampler):
            self.sampler.load_state_dict(state["sampler"])
            self._order = iter(self.sampler)

    def _has_batch(self) -> bool:
        left = self.num_rows - self.position
        return left >= self.batch_size if self.drop_last else left > 0

    def _take(self) -> Rows:
        if self._order is None:
            self._order = self._wound_forward()
        chosen = list(islice(self._order, self.batch_size))
        self.position += len(chosen)
        return self.collate_fn([self.dataset[row] for row in chosen])

    def _wound_forward(self) -> Iterator[int]:
        """The order of this epoch from the current position on."""
        if isinstance(self.sampler, EpochSampler):
            self.sampler.set_epoch(self.epoch)
        return islice(iter(self.sampler), self.position, None)

    def _next_epoch(self) -> None:
        self.epoch += 1
        self.position = 0
        self._order = None
