"""`RayClassWithInitArgs`: an actor class, its arguments, and the Ray options to start it with.

The colocated classes of `base.colocation` become actor classes here.
"""

import copy
from collections.abc import Mapping
from typing import Any

import ray
from ray.actor import ActorClass, ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from verl.single_controller.base.colocation import (
    ClassWithInitArgs,
    ColocatedWorker,
    colocated_class,
    fused_class,
)
from verl.utils import environment

CREATION_TIMEOUT_SECONDS = 300.0


class RayClassWithInitArgs(ClassWithInitArgs):
    """`cls` is what `ray.remote` gives; a plain class is made remote."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls if isinstance(cls, ActorClass) else ray.remote(cls), *args, **kwargs)
        self.options: dict[str, Any] = {}
        self._additional_resource: dict[str, float] = {}

    @property
    def worker_class(self) -> type:
        return unwrap_ray_remote(self.cls)

    def set_additional_resource(self, additional_resource: dict[str, float]) -> None:
        """Custom resources that each actor takes."""
        self._additional_resource = additional_resource

    def update_options(self, options: dict[str, Any]) -> None:
        """Ray options, such as `name`, `lifetime` or `runtime_env`."""
        self.options.update(options)

    def with_options(self, options: dict[str, Any]) -> "RayClassWithInitArgs":
        """The same with further options; this one stays as it is."""
        other = copy.copy(self)
        other.options = {**self.options, **options}
        return other

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        placement_group: PlacementGroup | None = None,
        placement_group_bundle_idx: int = 0,
        use_gpu: bool = True,
        num_gpus: float = 1,
        sharing_with: ActorHandle | None = None,
        device_name: str = "cuda",
    ) -> ActorHandle:
        """Start one actor in a bundle, or beside another actor with the same visible devices."""
        if sharing_with is not None:
            return self._start_beside(sharing_with)
        options: dict[str, Any] = {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=placement_group,  # pyright: ignore[reportArgumentType]
                placement_group_bundle_index=placement_group_bundle_idx,
            ),
            **self.options,
        }
        resources: dict[str, float] = {}
        if use_gpu and device_name == "cuda":
            options["num_gpus"] = num_gpus
        if use_gpu and device_name == "npu":
            resources["NPU"] = num_gpus
        resources |= self._additional_resource
        if resources:
            options["resources"] = resources
        return self.cls.options(**options).remote(*self.args, **self.kwargs)

    def _start_beside(self, neighbour: ActorHandle) -> ActorHandle:
        node_id, devices = ray.get(
            neighbour.__ray_call__.remote(_node_and_devices), timeout=CREATION_TIMEOUT_SECONDS
        )
        strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        started = self.cls.options(scheduling_strategy=strategy, **self.options)
        return started.remote(*self.args, cuda_visible_devices=devices, **self.kwargs)


def unwrap_ray_remote(actor_class: Any) -> type:
    """The Python class inside an actor class."""
    return actor_class.__ray_metadata__.modified_class.__ray_actor_class__


def _node_and_devices(worker: Any) -> tuple[str, str]:
    node_id = ray.get_runtime_context().get_node_id()
    return node_id, environment.variable("CUDA_VISIBLE_DEVICES")


def create_colocated_worker_cls(
    class_dict: Mapping[str, RayClassWithInitArgs],
) -> RayClassWithInitArgs:
    """One actor class for all roles; then `group.spawn(class_dict)`."""
    return RayClassWithInitArgs(colocated_class(class_dict))


def create_colocated_worker_raw_cls(
    class_dict: Mapping[str, RayClassWithInitArgs],
) -> type[ColocatedWorker]:
    """The fused class of all roles, before it is an actor class."""
    return fused_class(class_dict)


def create_colocated_worker_cls_fused(
    class_dict: Mapping[str, RayClassWithInitArgs],
) -> RayClassWithInitArgs:
    """One actor class for all roles; then `group.fuse(class_dict)`."""
    spec = RayClassWithInitArgs(create_colocated_worker_raw_cls(class_dict))
    spec.fused_worker_used = True
    return spec
