"""In which order the rows of a dataset are drawn.

An order is a function of a seed and the epoch, so that it can be computed again from these two
numbers: a run that stops continues with the very rows it would have seen. Samplers of users
(`data.sampler`) may change their order as training goes on.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
from torch.utils.data import Sampler


class AbstractSampler(Sampler[int]):
    """A user's sampler: iterating gives the row numbers of one epoch."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any) -> None: ...


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that learns from each trained batch what to draw next."""

    @abstractmethod
    def update(self, batch: Any) -> None: ...


class EpochSampler(Sampler[int]):
    """A sampler whose order depends on the epoch alone."""

    def __init__(self, data_source: Sized) -> None:
        self.data_source = data_source
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.data_source)


class SequentialOrder(EpochSampler):
    """Every epoch from the first row to the last."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


class RandomOrder(EpochSampler):
    """Every epoch in an order of its own, each row once."""

    def __init__(self, data_source: Sized, seed: int) -> None:
        super().__init__(data_source)
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self))
        return iter(order.tolist())
