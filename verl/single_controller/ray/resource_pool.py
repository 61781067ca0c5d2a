"""Pools of Ray resources: one placement group per node, one bundle per process.

A bundle has a device (where the pool has devices) and as many CPUs as roles may share the process,
so that several groups can put their ranks on the same devices. Placement groups are created on
first use, kept, and always given in the order of their nodes' addresses, so that ranks are stable.
"""

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup, placement_group

from verl.single_controller.base.resource_pool import PoolManager, ResourcePool
from verl.utils.device import KINDS
from verl.utils.environment import run_id

logger = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_SECONDS = 300.0
"""How long a cluster may take to place the groups, which includes starting nodes."""

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
DEVICE_RESOURCES = {name: kind.ray_resource for name, kind in KINDS.items() if kind.ray_resource}


class RayResourcePool(ResourcePool):
    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix or ""
        self.detached = detached
        self.accelerator_type = accelerator_type
        self.pgs: list[PlacementGroup] | None = None

    def get_placement_groups(
        self,
        strategy: Strategy = "STRICT_PACK",
        name: str | None = None,
        device_name: str = "cuda",
        timeout_seconds: float = PLACEMENT_TIMEOUT_SECONDS,
    ) -> list[PlacementGroup]:
        """One group per node, ordered by the nodes' addresses; `ValueError` if they do not fit."""
        if self.pgs is None:
            bundle = self._bundle(device_name)
            prefix = name or self._placement_group_prefix()
            created = [
                placement_group(
                    bundles=[bundle.copy() for _ in range(count)],
                    strategy=strategy,
                    name=f"{prefix}{node}",
                    lifetime="detached" if self.detached else None,
                )
                for node, count in enumerate(self.store)
            ]
            wait_for_resources(created, bundle, self.store, timeout_seconds)
            self.pgs = sort_placement_group_by_node_ip(created)
        return self.pgs

    def _placement_group_prefix(self) -> str:
        """Names are unique in a cluster; only those of detached groups need to be known before.

        The run's id tells the driver which groups to give back.
        """
        shape = "_".join(map(str, self.store))
        unique = "" if self.detached else f"{run_id()}{uuid.uuid4().hex[:6]}_"
        return f"{self.name_prefix}{unique}verl_group_{shape}:"

    def _bundle(self, device_name: str) -> dict[str, float]:
        bundle: dict[str, float] = {"CPU": self.max_colocate_count}
        if self.use_gpu:
            bundle[DEVICE_RESOURCES.get(device_name, "GPU")] = 1
            if self.accelerator_type is not None:
                bundle[self.accelerator_type] = 1e-4
        return bundle

    def release(self) -> None:
        """Give the resources back; what still runs on them is ended by Ray."""
        for group in self.pgs or []:
            remove_placement_group(group)
        self.pgs = None


class SubRayResourcePool(RayResourcePool):
    """Consecutive bundles of a pool: `subgroup_world_size` of them from `start_bundle_index` on."""

    def __init__(
        self,
        placement_groups: Sequence[PlacementGroup],
        start_bundle_index: int,
        subgroup_world_size: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pgs = list(placement_groups)
        self.start_bundle_index = start_bundle_index
        self.subgroup_world_size = subgroup_world_size

    @property
    def world_size(self) -> int:
        return self.subgroup_world_size


def wait_for_resources(
    groups: Sequence[PlacementGroup],
    bundle: Mapping[str, float],
    counts: Sequence[int],
    timeout_seconds: float,
) -> None:
    give_up = time.monotonic() + timeout_seconds
    for group, count in zip(groups, counts, strict=True):
        if group.wait(min(10.0, timeout_seconds)):
            continue
        needed = f"{count} bundles of {dict(bundle)} on one node"
        logger.warning("waiting for %s; the cluster has %s", needed, ray.cluster_resources())
        if not group.wait(max(0.0, give_up - time.monotonic())):
            for created in groups:
                remove_placement_group(created)
            raise ValueError(
                f"no resources for {needed} within {timeout_seconds:g} s; free now: "
                f"{ray.available_resources()}; ask for less, or lower max_colocate_count "
                f"(it is the CPUs of a bundle)"
            )


def sort_placement_group_by_node_ip(groups: Sequence[PlacementGroup]) -> list[PlacementGroup]:
    """Ordered by the address of the node that holds a group's first bundle."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def address(group: PlacementGroup) -> str:
        return addresses[node_of_bundle(group, 0)]

    return sorted(groups, key=address)


def node_of_bundle(group: PlacementGroup, bundle: int) -> str:
    return placement_group_table(group)["bundles_to_node_id"][bundle]


def split_resource_pool(
    resource_pool: RayResourcePool, split_size: int | Sequence[int]
) -> list[SubRayResourcePool]:
    """Cut a pool into pools of `split_size` processes each, or of the listed sizes."""
    total = resource_pool.world_size
    if isinstance(split_size, int):
        if split_size < 1 or total % split_size:
            raise ValueError(
                f"a pool of {total} processes cannot be cut into parts of {split_size}"
            )
        sizes = [split_size] * (total // split_size)
    else:
        sizes = list(split_size)
    if sum(sizes) != total:
        raise ValueError(f"parts of {sizes} processes do not make up the pool's {total}")
    is_part = isinstance(resource_pool, SubRayResourcePool)
    first = resource_pool.start_bundle_index if is_part else 0
    return [
        SubRayResourcePool(
            placement_groups=resource_pool.get_placement_groups(),
            start_bundle_index=first + sum(sizes[:part]),
            subgroup_world_size=size,
            process_on_nodes=resource_pool.store,
            use_gpu=resource_pool.use_gpu,
            name_prefix=f"{resource_pool.name_prefix}_split_{part}",
            max_colocate_count=resource_pool.max_colocate_count,
            detached=resource_pool.detached,
            accelerator_type=resource_pool.accelerator_type,
        )
        for part, size in enumerate(sizes)
    ]


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """The nodes of both pools as one pool."""
    for name in ("use_gpu", "max_colocate_count", "n_gpus_per_node", "detached"):
        first, second = vars(rp1)[name], vars(rp2)[name]
        if first != second:
            raise ValueError(f"cannot merge pools that differ in {name}: {first} and {second}")
    merged = RayResourcePool(
        [*rp1.store, *rp2.store],
        rp1.use_gpu,
        f"{rp1.name_prefix}_{rp2.name_prefix}",
        rp1.max_colocate_count,
        rp1.detached,
        rp1.accelerator_type,
    )
    merged.pgs = [*rp1.get_placement_groups(), *rp2.get_placement_groups()]
    return merged


def extract_pg_from_exist(
    resource_pools: Mapping[str, RayResourcePool],
    src_role_names: Sequence[str],
    resource_pool: RayResourcePool,
) -> list[PlacementGroup]:
    """Placement groups of the named pools that fit the nodes of `resource_pool`."""
    pools = (pool for name, pool in resource_pools.items() if name in src_role_names)
    groups = [group for pool in pools for group in pool.get_placement_groups()]
    groups.sort(key=lambda group: group.bundle_count, reverse=True)
    wanted = sorted(range(len(resource_pool.store)), key=lambda i: -resource_pool.store[i])
    chosen: dict[int, PlacementGroup] = {}
    for node, group in zip(wanted, groups, strict=False):
        if resource_pool.store[node] <= group.bundle_count:
            chosen[node] = group
    if len(chosen) < len(wanted):
        raise ValueError(
            f"nodes with {resource_pool.store} processes do not fit into existing placement groups "
            f"of {[group.bundle_count for group in groups]} bundles"
        )
    return [chosen[node] for node in range(len(wanted))]


@dataclass
class ResourcePoolManager(PoolManager[RayResourcePool]):
    """Pools for the roles of a training run."""

    use_gpu: bool = True
    """Whether each process has a GPU (or NPU) of its own; without, the pools only count CPUs."""

    def create_resource_pool(self) -> None:
        self._check_resource_available()
        super().create_resource_pool()

    def new_pool(self, name: str, process_on_nodes: list[int]) -> RayResourcePool:
        # Three roles share a device in a PPO run: actor with rollout, critic, reward model.
        return RayResourcePool(
            process_on_nodes, use_gpu=self.use_gpu, max_colocate_count=3, name_prefix=name
        )

    def _check_resource_available(self) -> None:
        if not self.use_gpu:
            return
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        devices = [max(found.get("GPU", 0), found.get("NPU", 0)) for found in alive]
        wanted = self.get_n_gpus()
        if sum(devices) < wanted:
            raise ValueError(
                f"Total available GPUs {sum(devices):g} is less than total desired GPUs {wanted}; "
                f"the pools are {self.resource_pool_spec}"
            )
