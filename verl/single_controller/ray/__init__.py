"""Workers as Ray actors in placement groups. The only folder that imports Ray when it is loaded."""

from verl.single_controller.controllers import Controller
from verl.single_controller.ray.actors import (
    RayClassWithInitArgs,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
)
from verl.single_controller.ray.resource_pool import (
    RayResourcePool,
    ResourcePoolManager,
    SubRayResourcePool,
    extract_pg_from_exist,
    merge_resource_pool,
    sort_placement_group_by_node_ip,
    split_resource_pool,
)
from verl.single_controller.ray.worker_group import RayWorkerGroup

CONTROLLER = Controller(
    worker_group=RayWorkerGroup,
    class_with_init_args=RayClassWithInitArgs,
    resource_pool_manager=ResourcePoolManager,
    create_colocated_worker_cls=create_colocated_worker_cls,
    create_colocated_worker_cls_fused=create_colocated_worker_cls_fused,
)

__all__ = [
    "CONTROLLER",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "SubRayResourcePool",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "extract_pg_from_exist",
    "merge_resource_pool",
    "sort_placement_group_by_node_ip",
    "split_resource_pool",
]
