"""A process group of this process alone: the calls that ranks make, without the other ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


@contextmanager
def group_of_one(backend: str, folder: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group(
        backend,
        init_method=f"file://{folder / 'store'}",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
    )
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
