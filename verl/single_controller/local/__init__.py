"""Workers on this machine without Ray: in this process, or as its child processes."""

from verl.single_controller.base.colocation import ClassWithInitArgs
from verl.single_controller.controllers import Controller
from verl.single_controller.local.future import LocalFuture
from verl.single_controller.local.worker_group import (
    LocalResourcePoolManager,
    LocalWorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
)

CONTROLLER = Controller(
    worker_group=LocalWorkerGroup,
    class_with_init_args=ClassWithInitArgs,
    resource_pool_manager=LocalResourcePoolManager,
    create_colocated_worker_cls=create_colocated_worker_cls,
    create_colocated_worker_cls_fused=create_colocated_worker_cls_fused,
)

__all__ = [
    "CONTROLLER",
    "LocalFuture",
    "LocalResourcePoolManager",
    "LocalWorkerGroup",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
]
