"""In which order the rows of a dataset are drawn.

An order is a function of a seed, the epoch and the number of rows, so that it can be computed again
from these three numbers: a run that stops continues with the very rows it would have seen. Samplers
of users (`data.sampler`) may change their order as training goes on; with `state_dict` and
`load_state_dict` they continue exactly, too.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sized
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import Sampler


@runtime_checkable
class Stateful(Protocol):
    """Something that is saved with a run and continues by itself where it was.

    A state is plain data: numbers, texts, lists, dictionaries, NumPy arrays and tensors.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class AbstractSampler(Sampler[int]):
    """A user's sampler: iterating gives the row numbers of one epoch, as many as its length."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any) -> None: ...


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that learns from each trained batch what to draw next."""

    @abstractmethod
    def update(self, batch: Any) -> None: ...


class EpochSampler(Sampler[int]):
    """A sampler whose order depends on the epoch and its number of rows alone."""

    def __init__(self, data_source: Sized) -> None:
        self.data_source = data_source
        self.epoch = 0
        self._num_rows: int | None = None

    def set_epoch(self, epoch: int, num_rows: int | None = None) -> None:
        """Give the order of this epoch next; `num_rows` is the size the data had at its start."""
        self.epoch = epoch
        self._num_rows = num_rows

    @property
    def num_rows(self) -> int:
        return len(self.data_source) if self._num_rows is None else self._num_rows

    def __len__(self) -> int:
        """Rows of an epoch that begins now."""
        return len(self.data_source)


class SequentialOrder(EpochSampler):
    """Every epoch from the first row to the last."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_rows))


class RandomOrder(EpochSampler):
    """Every epoch in an order of its own, each row once."""

    def __init__(self, data_source: Sized, seed: int) -> None:
        super().__init__(data_source)
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.num_rows)
        return map(int, order)
