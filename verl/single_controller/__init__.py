"""One driver, many workers: the driver calls a group of ranks like one object.

`base` holds what is common, `local` runs ranks on this machine, `ray` runs them as actors in a
cluster (and is the only folder that imports Ray). docs/controllers.md tells how a call travels.
"""

from verl import __version__
from verl.single_controller.base import (
    ClassWithInitArgs,
    ResourcePool,
    Worker,
    WorkerDied,
    WorkerError,
    WorkerGroup,
    WorkerTimeout,
)

__all__ = [
    "ClassWithInitArgs",
    "ResourcePool",
    "Worker",
    "WorkerDied",
    "WorkerError",
    "WorkerGroup",
    "WorkerTimeout",
    "__version__",
]
