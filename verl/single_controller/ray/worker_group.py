"""`RayWorkerGroup`: the ranks are actors, one in each bundle of a resource pool.

`Launch` starts them: where each rank goes, its name and its environment. Ray shows a worker only
its own device, so `LOCAL_RANK` (the number of the device among the visible ones) is 0 on GPUs; on a
CPU it is the rank on the node. The ranks meet at an address that is chosen on the node of rank 0,
before any actor starts. Actors end with the driver, or when nobody holds the group any more, unless
they are `detached`; detached ones are found again with `from_detached`.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.single_controller.base.backend import DEFAULT_CALL_TIMEOUT_SECONDS
from verl.single_controller.base.worker import available_master_addr_port
from verl.single_controller.base.worker_group import WorkerGroup
from verl.single_controller.ray.actors import RayClassWithInitArgs
from verl.single_controller.ray.backend import RayBackend
from verl.single_controller.ray.resource_pool import (
    RayResourcePool,
    Strategy,
    SubRayResourcePool,
    node_of_bundle,
)
from verl.utils.environment import temp_env_var


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


class Placement(NamedTuple):
    """Where one rank runs."""

    rank: int
    group: PlacementGroup
    node: int
    bundle: int
    local_rank: int
    local_world_size: int


@dataclass(frozen=True)
class Launch:
    """All that the actors of one group have in common."""

    spec: RayClassWithInitArgs
    pool: RayResourcePool
    name_prefix: str
    detached: bool
    use_gpu: bool
    device_name: str
    strategy: Strategy
    timeout_seconds: float
    master_addr: str | None = None
    master_port: str | None = None
    worker_env: Mapping[str, str] = field(default_factory=dict)
    nsight: Mapping[str, Any] | None = None

    def start(self) -> tuple[list[ActorHandle], list[str], tuple[str, str]]:
        """The actors, their names, and where they meet."""
        groups = self.pool.get_placement_groups(
            strategy=self.strategy, device_name=self.device_name
        )
        placements = placements_in(self.pool, groups)
        address, port = self.master_addr, self.master_port
        if address is None or port is None:
            found = free_address_in(placements[0].group, placements[0].bundle, self.timeout_seconds)
            address, port = address or found[0], port or found[1]
        names = [self._name(placement) for placement in placements]
        workers = [
            self._start_one(placement, name, self._variables(placement, address, port))
            for placement, name in zip(placements, names, strict=True)
        ]
        return workers, names, (address, port)

    def _name(self, placement: Placement) -> str:
        bundle = f"{placement.node}:{placement.bundle}"
        return f"{self.name_prefix}{self.spec.worker_class.__name__}_{bundle}"

    def _variables(self, placement: Placement, address: str, port: str) -> dict[str, str]:
        own = {
            "WORLD_SIZE": str(self.pool.world_size),
            "RANK": str(placement.rank),
            "LOCAL_RANK": "0" if self.use_gpu else str(placement.local_rank),
            "WG_PREFIX": self.name_prefix,
            "WG_BACKEND": "ray",
            "RAY_LOCAL_WORLD_SIZE": str(placement.local_world_size),
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
        }
        clash = sorted(own.keys() & self.worker_env.keys())
        if clash:
            raise ValueError(f"worker_env sets {clash}, which the worker group sets itself")
        return {**own, **self.worker_env}

    def _start_one(self, placement: Placement, name: str, variables: dict[str, str]) -> ActorHandle:
        runtime_env = dict(self.spec.options.get("runtime_env", {}))
        runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **variables}
        if self.nsight is not None:
            runtime_env["nsight"] = dict(self.nsight)
        options: dict[str, Any] = {"runtime_env": runtime_env, "name": name}
        if self.detached:
            options["lifetime"] = "detached"
        return self.spec.with_options(options)(
            placement_group=placement.group,
            placement_group_bundle_idx=placement.bundle,
            use_gpu=self.use_gpu,
            num_gpus=1 / self.pool.max_colocate_count,
            device_name=self.device_name,
        )


def placements_in(pool: RayResourcePool, groups: Sequence[PlacementGroup]) -> list[Placement]:
    """One placement per rank, in the order of the groups and their bundles."""
    bundles = [
        (group, node, bundle)
        for node, (group, count) in enumerate(zip(groups, pool.store, strict=True))
        for bundle in range(count)
    ]
    if isinstance(pool, SubRayResourcePool):
        start = pool.start_bundle_index
        bundles = bundles[start : start + pool.subgroup_world_size]
    nodes = [node for _, node, _ in bundles]
    return [
        Placement(rank, group, node, bundle, nodes[:rank].count(node), nodes.count(node))
        for rank, (group, node, bundle) in enumerate(bundles)
    ]


def free_address_in(group: PlacementGroup, bundle: int, timeout_seconds: float) -> tuple[str, str]:
    """An address and a free port on the node that holds a bundle."""
    if node_of_bundle(group, bundle) == ray.get_runtime_context().get_node_id():
        return free_address()
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=bundle
    )
    task = ray.remote(free_address).options(num_cpus=0, scheduling_strategy=strategy)
    return ray.get(task.remote(), timeout=timeout_seconds)


def free_address() -> tuple[str, str]:
    with temp_env_var("WG_BACKEND", "ray"):  # the cluster's address of this node, not loopback
        return available_master_addr_port()
