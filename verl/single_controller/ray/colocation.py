"""Colocated classes as Ray actors; what they are is in `base.colocation`."""

from collections.abc import Mapping

from verl.single_controller.base.colocation import ColocatedWorker, colocated_class, fused_class
from verl.single_controller.ray.actors import RayClassWithInitArgs


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
