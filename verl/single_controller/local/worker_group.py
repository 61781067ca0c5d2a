"""`LocalWorkerGroup`: workers on this machine, without Ray.

One rank is an object in this process; several ranks are child processes that can form a process
group (gloo on a CPU, NCCL on GPUs, where `LOCAL_RANK` numbers the device). Everything a group can
do is in `base.worker_group`; here is only which back-end is started and with what environment.
"""

from collections.abc import Mapping
from typing import Any

from verl.single_controller.base.backend import DEFAULT_CALL_TIMEOUT_SECONDS, Backend, Call
from verl.single_controller.base.colocation import (
    ClassWithInitArgs,
    colocated_class,
    fused_class,
)
from verl.single_controller.base.resource_pool import PoolManager, ResourcePool
from verl.single_controller.base.worker import available_master_addr_port
from verl.single_controller.base.worker_group import WorkerGroup
from verl.single_controller.local.in_process import InProcessBackend
from verl.single_controller.local.payload import CONSTRUCT
from verl.single_controller.local.processes import ProcessBackend

DEFAULT_LAUNCH_TIMEOUT_SECONDS = 300.0


class LocalWorkerGroup(WorkerGroup):
    """A group on this machine.

    `in_process` says whether a single rank lives in this process (the default) or in a child.
    `ray_cls_with_init` is another name of `cls_with_init`, which code written for Ray uses.
    """

    def __init__(
        self,
        resource_pool: ResourcePool | None = None,
        cls_with_init: ClassWithInitArgs | None = None,
        *,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        name_prefix: str | None = None,
        in_process: bool | None = None,
        worker_env: Mapping[str, str] | None = None,
        device_name: str = "cpu",
        call_timeout_seconds: float = DEFAULT_CALL_TIMEOUT_SECONDS,
        launch_timeout_seconds: float = DEFAULT_LAUNCH_TIMEOUT_SECONDS,
    ) -> None:
        spec = cls_with_init or ray_cls_with_init
        if spec is None:
            raise ValueError("a local worker group needs cls_with_init, a ClassWithInitArgs")
        pool = resource_pool or ResourcePool([1])
        name = name_prefix or spec.worker_class.__name__
        self.device_name = device_name
        self.master_address, self.master_port = available_master_addr_port()
        construct = Call(name, CONSTRUCT, launch_timeout_seconds)
        backend = self._start(construct, spec, pool, in_process, worker_env or {})
        if isinstance(backend, InProcessBackend):  # the ranks of this process meet where it does
            self.master_address, self.master_port = backend.meeting_point
        super().__init__(
            pool,
            backend=backend,
            worker_class=spec.worker_class,
            name=name,
            call_timeout_seconds=call_timeout_seconds,
        )

    def _start(
        self,
        construct: Call,
        spec: ClassWithInitArgs,
        pool: ResourcePool,
        in_process: bool | None,
        worker_env: Mapping[str, str],
    ) -> Backend:
        if pool.world_size < 1:
            raise ValueError(
                "the resource pool is empty; give it processes, as in ResourcePool([2])"
            )
        if in_process and pool.world_size > 1:
            raise ValueError(f"{pool.world_size} ranks cannot all be this process")
        variables = rank_variables(pool, self.master_address, self.master_port)
        clash = sorted(worker_env.keys() & variables[0].keys())
        if clash:
            raise ValueError(f"worker_env sets {clash}, which the worker group sets itself")
        variables = [{**own, **worker_env} for own in variables]
        if in_process or (in_process is None and pool.world_size == 1):
            return InProcessBackend(construct, spec, variables[0])
        return ProcessBackend(construct, spec, variables)


def rank_variables(pool: ResourcePool, address: str, port: str) -> list[dict[str, str]]:
    """The environment of each rank, as torchrun would set it."""
    local_ranks = zip(pool.local_rank_list(), pool.local_world_size_list(), strict=True)
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(pool.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "WG_BACKEND": "local",
        }
        for rank, (local_rank, local_world_size) in enumerate(local_ranks)
    ]


class LocalResourcePoolManager(PoolManager[ResourcePool]):
    """Pools on this machine: they only count processes."""

    def new_pool(self, name: str, process_on_nodes: list[int]) -> ResourcePool:
        return ResourcePool(process_on_nodes, max_colocate_count=3)


class LocalColocatedClass(ClassWithInitArgs):
    """A colocated class; it travels as its roles, because a class made at run time cannot."""

    def __init__(self, class_dict: Mapping[str, ClassWithInitArgs], is_fused: bool) -> None:
        super().__init__((fused_class if is_fused else colocated_class)(class_dict))
        self.class_dict = dict(class_dict)
        self.fused_worker_used = is_fused

    @property
    def modules(self) -> list[str]:
        return [module for spec in self.class_dict.values() for module in spec.modules]

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalColocatedClass, (self.class_dict, self.fused_worker_used)


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> ClassWithInitArgs:
    """All roles in one process per rank; then `group.spawn(class_dict)`."""
    return LocalColocatedClass(class_dict, is_fused=False)


def create_colocated_worker_cls_fused(
    class_dict: Mapping[str, ClassWithInitArgs],
) -> ClassWithInitArgs:
    """All roles in one process per rank; then `group.fuse(class_dict)`."""
    return LocalColocatedClass(class_dict, is_fused=True)
