"""What every role does because it is one rank of several.

Ranks that share a sequence (`ulysses_sequence_parallel_size` of them, numbered consecutively) get
the same rows; the first of them answers for all. Roles in one process share its process group.
"""

from typing import Any

import torch.distributed as dist

from verl.single_controller.base.worker import Worker
from verl.utils.distributed import initialize_global_process_group


class RankWorker(Worker):
    """A role's worker; `config` is its section, `device` the kind of device it runs on."""

    config: Any
    device: str

    def join_ranks(self, *, timeout_seconds: float) -> None:
        """Take this rank's device and meet the others; nothing to do alone."""
        if self.world_size > 1:
            initialize_global_process_group(timeout_seconds)

    def take_part_in(self, mesh_name: str, *, ranks_per_sequence: int) -> None:
        """Say which rows this rank gets, and whether its answer counts."""
        self._register_dispatch_collect_info(
            mesh_name,
            dp_rank=self.rank // ranks_per_sequence,
            is_collect=self.rank % ranks_per_sequence == 0,
        )

    def neighbours(self, size: int) -> dist.ProcessGroup | None:
        """The group of `size` consecutive ranks that this one is in; None if it is alone there.

        All ranks must ask, in the same order.
        """
        if size == 1:
            return None
        starts = range(0, self.world_size, size)
        groups = [dist.new_group(list(range(first, first + size))) for first in starts]
        own = groups[self.rank // size]
        assert isinstance(own, dist.ProcessGroup)
        return own
