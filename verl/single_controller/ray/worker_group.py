"""`RayWorkerGroup`: the ranks are actors, one in each bundle of a resource pool.

How actors are started is in `launch`, how they are called in `backend`, and all that a group can do
in `base.worker_group`. Actors end with the driver, or when nobody holds the group any more, unless
they are `detached`; detached ones are found again with `from_detached`.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from verl.single_controller.base.backend import DEFAULT_CALL_TIMEOUT_SECONDS
from verl.single_controller.base.worker_group import WorkerGroup
from verl.single_controller.ray.actors import RayClassWithInitArgs
from verl.single_controller.ray.backend import RayBackend
from verl.single_controller.ray.launch import Launch
from verl.single_controller.ray.resource_pool import RayResourcePool


class RayWorkerGroup(WorkerGroup):
    """Actors started in `resource_pool`, or running ones: by names, by handles or by prefix."""

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[ActorHandle] | None = None,
        ray_wait_register_center_timeout: float = 300,
        *,
        master_addr: str | None = None,
        master_port: str | int | None = None,
        use_gpu: bool | None = None,
        device_name: str = "cuda",
        profile_steps: Any = None,
        worker_nsight_options: Mapping[str, Any] | None = None,
        worker_env: Mapping[str, str] | None = None,
        call_timeout_seconds: float = DEFAULT_CALL_TIMEOUT_SECONDS,
    ) -> None:
        self.ray_cls_with_init = ray_cls_with_init
        self.device_name = device_name
        self.name_prefix = name_prefix or uuid.uuid4().hex[:6]
        self.master_address, self.master_port = master_addr or "", str(master_port or "")
        worker_class = ray_cls_with_init.worker_class if ray_cls_with_init else None
        if resource_pool is None:
            backend = attach(name_prefix, worker_names, worker_handles)
        elif ray_cls_with_init is None:
            raise ValueError("starting actors in a resource pool needs ray_cls_with_init")
        else:
            launch = Launch(
                spec=ray_cls_with_init,
                pool=resource_pool,
                name_prefix=self.name_prefix,
                detached=detached,
                use_gpu=resource_pool.use_gpu if use_gpu is None else use_gpu,
                device_name=device_name,
                strategy="STRICT_PACK" if bin_pack else "PACK",
                timeout_seconds=ray_wait_register_center_timeout,
                master_addr=master_addr,
                master_port=None if master_port is None else str(master_port),
                worker_env=worker_env or {},
                nsight=worker_nsight_options if profile_steps else None,
            )
            workers, names, (self.master_address, self.master_port) = launch.start()
            backend = RayBackend(workers, names, owned=True, lasting=detached)
        self.worker_names = backend.names
        super().__init__(
            resource_pool,
            backend=backend,
            worker_class=worker_class,
            name=name_prefix or (worker_class.__name__ if worker_class else self.name_prefix),
            call_timeout_seconds=call_timeout_seconds,
        )

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[ActorHandle] | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        **kwargs: Any,
    ) -> "RayWorkerGroup":
        """Attach to actors that run already; without names or handles, to those of a prefix."""
        return cls(
            resource_pool=None,
            ray_cls_with_init=ray_cls_with_init,
            name_prefix=name_prefix,
            worker_names=worker_names,
            worker_handles=worker_handles,
            **kwargs,
        )


def attach(
    name_prefix: str | None,
    worker_names: Sequence[str] | None,
    worker_handles: Sequence[ActorHandle] | None,
) -> RayBackend:
    names = list(worker_names or [])
    if not names and worker_handles is None:
        if not name_prefix:
            raise ValueError("give a resource_pool to start workers, or worker_names to attach to")
        found = [name for name in ray.util.list_named_actors() if name.startswith(name_prefix)]
        names = sorted(found, key=_place_in_name)
        if not names:
            raise ValueError(f"no actor whose name starts with {name_prefix!r} is alive")
    handles = worker_handles or [ray.get_actor(name) for name in names]
    return RayBackend(handles, names, owned=False, lasting=True)


def _place_in_name(name: str) -> tuple[int, int]:
    """Node and bundle, with which `launch` ends each actor's name."""
    node, _, bundle = name.rpartition("_")[2].partition(":")
    return int(node), int(bundle)
