"""Which part of a run this process is: rank `rank` of `size`, and what ranks tell each other.

Rank 0 reports and writes; all others compute. Rows are dealt out like cards, so that ranks get
rows from all over the batch. What ranks agree on travels as numbers in double precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from verl.utils.distributed import all_reduce_, is_distributed

Row = TypeVar("Row")


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    size: int = 1

    @classmethod
    def here(cls) -> "Ranks":
        """Of the process group that this process has joined; alone if there is none."""
        return cls(dist.get_rank(), dist.get_world_size()) if is_distributed() else cls()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, rows: Sequence[Row]) -> Sequence[Row]:
        """This rank's part of `rows`."""
        return rows[self.rank :: self.size]

    def total(self, *values: float) -> list[float]:
        """Each value summed over the ranks; every rank must ask. Counts stay exact to 2^53."""
        return all_reduce_(torch.tensor(values, dtype=torch.float64)).tolist()

    def agree(self, value: bool) -> bool:
        """Whether any rank says so."""
        return self.total(value)[0] > 0

    def meet(self) -> None:
        """Go on when every rank is here, within the time limit of the process group."""
        self.total(0)
