"""Rows between those who make them and those who train on them, by reference.

`create` makes a plane, `connect` reaches it from its address, in this or another process.
"""

from collections.abc import Mapping
from typing import Any

from verl.data_plane.plane import (
    Columns,
    DataPlane,
    KeyTaken,
    Limits,
    PlaneError,
    PlaneFull,
    PlaneLost,
    PlaneTimeout,
    Ready,
    Receipt,
    RowsLost,
    RowsMissing,
)
from verl.utils.registry import Registry

__all__ = [
    "Columns",
    "DataPlane",
    "KeyTaken",
    "Limits",
    "PlaneError",
    "PlaneFull",
    "PlaneLost",
    "PlaneTimeout",
    "Ready",
    "Receipt",
    "RowsLost",
    "RowsMissing",
    "connect",
    "create",
    "planes",
]

planes = Registry[Any](
    "data plane",
    in_process="verl.data_plane.in_process:InProcessPlane",
    ray="verl.data_plane.on_ray:RayPlane",
    transfer_queue="verl.data_plane.tq_package:TransferQueuePlane",
)


def create(
    backend: str,
    name: str,
    limits: Limits | None = None,
    options: Mapping[str, Any] | None = None,
) -> DataPlane:
    """A new, empty plane; `options` are those of the package TransferQueue."""
    return planes[backend].create(name, limits, options or {})


def connect(address: Mapping[str, Any]) -> DataPlane:
    """The plane that `address()` of it describes."""
    return planes[address["backend"]].connect(address)
