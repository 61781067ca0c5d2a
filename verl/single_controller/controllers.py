"""The back-ends by name, for `trainer.controller`.

Each is a `Controller`, so that the trainer is the same on all of them. Ray is imported when
`controllers["ray"]` is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl.single_controller.base.colocation import ClassWithInitArgs
from verl.single_controller.base.resource_pool import PoolManager
from verl.single_controller.base.worker_group import WorkerGroup
from verl.utils.registry import Registry


@dataclass(frozen=True)
class Controller:
    worker_group: Callable[..., WorkerGroup]
    """Called as `worker_group(resource_pool, class_with_init_args, ...)`."""

    class_with_init_args: Callable[..., ClassWithInitArgs]
    """Called as `class_with_init_args(worker_class, *args, **kwargs)`."""

    resource_pool_manager: Callable[..., PoolManager[Any]]
    """Called as `resource_pool_manager(resource_pool_spec, mapping)`."""

    create_colocated_worker_cls: Callable[..., ClassWithInitArgs]
    """All roles in one process; then `group.spawn(roles)`."""

    create_colocated_worker_cls_fused: Callable[..., ClassWithInitArgs]
    """All roles in one process; then `group.fuse(roles)`."""


controllers = Registry[Controller](
    "controller",
    local="verl.single_controller.local:CONTROLLER",
    ray="verl.single_controller.ray:CONTROLLER",
)
