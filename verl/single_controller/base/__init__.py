"""What every controller back-end shares: workers, groups of them, and how calls travel."""

from verl.single_controller.base.colocation import ClassWithInitArgs
from verl.single_controller.base.failures import WorkerDied, WorkerError, WorkerTimeout
from verl.single_controller.base.resource_pool import ResourcePool
from verl.single_controller.base.worker import Worker
from verl.single_controller.base.worker_group import WorkerGroup

__all__ = [
    "ClassWithInitArgs",
    "ResourcePool",
    "Worker",
    "WorkerDied",
    "WorkerError",
    "WorkerGroup",
    "WorkerTimeout",
]
