"""`Worker`: what runs on one rank. Who it is comes from torch-style environment variables.

The back-end sets `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and
`MASTER_PORT` before it constructs a worker, so `torch.distributed.init_process_group` works inside.
A worker also says, for each mesh it takes part in, which data-parallel rank it has there and
whether its results count; `mesh_dispatch` asks for that.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from verl.single_controller.base.decorator import register
from verl.single_controller.base.dispatch import Dispatch, Execute
from verl.utils import environment
from verl.utils.device import seed_everything
from verl.utils.ray_utils import node_ip_address, visible_device_index
from verl.utils.tensor_rows import BatchError

Value = TypeVar("Value", int, bool)


@dataclass
class DistRankInfo:
    tp_rank: int
    dp_rank: int
    pp_rank: int
    cp_rank: int


@dataclass
class DistGlobalInfo:
    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int


class Worker:
    """The base of every worker class; a subclass adds methods with `@register`."""

    fused_worker_attr_name = "fused_worker_dict"

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        if cuda_visible_devices is not None:
            environment.set_variable("CUDA_VISIBLE_DEVICES", cuda_visible_devices)
        if not environment.is_inside_colocated_worker():
            _use_one_name_for_visible_devices()
            _number_this_process_on_ray()
        self._world_size = environment.world_size()
        self._rank = environment.rank()
        self._local_rank = environment.local_rank()
        self._local_world_size = int(environment.variable("LOCAL_WORLD_SIZE", "1"))
        self.fused_worker_dict: dict[str, Worker] = {}
        self._dispatch_dp_rank: dict[str, int] = {}
        self._is_collect: dict[str, bool] = {}

    @classmethod
    def env_keys(cls) -> list[str]:
        """The environment variables that say who a worker is."""
        return [
            "WORLD_SIZE",
            "RANK",
            "LOCAL_WORLD_SIZE",
            "LOCAL_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
            "CUDA_VISIBLE_DEVICES",
        ]

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def rank(self) -> int:
        return self._rank

    def get_master_addr_port(self) -> tuple[str, str]:
        """Where the ranks of this group meet."""
        return environment.variable("MASTER_ADDR"), environment.variable("MASTER_PORT")

    def get_cuda_visible_devices(self) -> str:
        return environment.variable("CUDA_VISIBLE_DEVICES", "not set")

    def get_available_master_addr_port(self) -> tuple[str, str]:
        """An address of this machine and a port that is free on it now."""
        return available_master_addr_port()

    get_availale_master_addr_port = get_available_master_addr_port

    def get_fused_worker_by_name(self, worker_name: str) -> "Worker | None":
        """Another role in the same process, or None."""
        return self.fused_worker_dict.get(worker_name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def seed_rank(self, seed: int) -> None:
        """Determine what this rank draws; no two ranks draw the same."""
        seed_everything((seed + self.rank) % 2**63)

    # ---- meshes ----------------------------------------------------------------------------------

    def _register_dispatch_collect_info(
        self, mesh_name: str, dp_rank: int, is_collect: bool
    ) -> None:
        if mesh_name in self._dispatch_dp_rank:
            raise BatchError(f"mesh {mesh_name!r} is already registered on this worker")
        self._dispatch_dp_rank[mesh_name] = dp_rank
        self._is_collect[mesh_name] = is_collect

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        return _of_mesh(self._dispatch_dp_rank, mesh_name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        return self.query_collect_info(mesh_name)

    def query_collect_info(self, mesh_name: str) -> bool:
        return _of_mesh(self._is_collect, mesh_name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """All meshes of this worker, in the form that `set_dispatch_collect` takes."""
        return {
            "dispatch_dp_rank": dict(self._dispatch_dp_rank),
            "collect_dp_rank": dict(self._is_collect),
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_dispatch_collect(
        self,
        mesh_name: str,
        dispatch_dp_rank: dict[str, int],
        collect_dp_rank: dict[str, bool],
    ) -> None:
        """Take over, under the name `mesh_name`, the mesh of an inner worker.

        The mesh of that very name is taken, else the only one; several others must agree.
        """
        self._register_dispatch_collect_info(
            mesh_name,
            dp_rank=_only_value(mesh_name, dispatch_dp_rank),
            is_collect=_only_value(mesh_name, collect_dp_rank),
        )

    # ---- running a function on the ranks ---------------------------------------------------------

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(
        self, func: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def create_transferqueue_client(self, config: Any) -> None:
        """Nothing to do: a stored batch brings the address of its data plane."""


def available_master_addr_port() -> tuple[str, str]:
    address = node_ip_address() if environment.is_ray_worker() else "127.0.0.1"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return address, str(probe.getsockname()[1])


def _of_mesh(table: dict[str, Value], mesh_name: str) -> Value:
    if mesh_name not in table:
        raise ValueError(
            f"mesh {mesh_name!r} is not registered on this worker; known: {sorted(table)}"
        )
    return table[mesh_name]


def _only_value(mesh_name: str, values: dict[str, Value]) -> Value:
    if mesh_name in values:
        return values[mesh_name]
    distinct = set(values.values())
    if len(distinct) != 1:
        raise ValueError(
            f"cannot tell which mesh becomes {mesh_name!r}: the inner worker has {values}; "
            f"pass the entry of one mesh"
        )
    return distinct.pop()


def _use_one_name_for_visible_devices() -> None:
    """AMD's names for the list of visible devices become CUDA's, which torch obeys everywhere."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    found = {name: environment.variable(name) for name in names if environment.variable(name)}
    if len(set(found.values())) > 1:
        raise ValueError(f"{found} name different devices; set only CUDA_VISIBLE_DEVICES")
    for name in found:
        environment.set_variable("CUDA_VISIBLE_DEVICES", found[name])
    for name in names[1:]:
        environment.remove_variable(name)


def _number_this_process_on_ray() -> None:
    """LOCAL_RANK numbers a worker's device among those it can see; Ray mostly shows only one."""
    if not environment.is_ray_worker():
        return
    environment.set_variable("LOCAL_WORLD_SIZE", environment.variable("RAY_LOCAL_WORLD_SIZE", "1"))
    if environment.ray_leaves_devices_visible():
        environment.set_variable("LOCAL_RANK", str(visible_device_index()))
