"""Where the roles of a run live: which pool, which processes, with what environment.

Roles that share a pool share its processes, one of each role per rank, so that they share devices.
A single rank of the local controller is this very process, where the roles are plain objects; a
pool beside it has processes of its own.
"""

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from verl.config.ppo import PPOConfig
from verl.config.roles import pool_devices, ranks_beside, teacher_ranks, world_size
from verl.single_controller.base.colocation import ClassWithInitArgs
from verl.single_controller.base.resource_pool import PoolManager
from verl.single_controller.controllers import Controller
from verl.single_controller.local import CONTROLLER as LOCAL
from verl.trainer.ppo.utils import Role
from verl.utils.device import get_visible_devices_keyword
from verl.utils.environment import has_chosen_threads, usable_cores
from verl.workers.rollout.factory import ranks_per_engine

POOL = "global_pool"
REWARD_POOL = "reward_pool"
ROLLOUT_POOL = "rollout_pool"
TEACHER_POOL = "teacher_pool"
JOINED_POOL = "joined_rollout_pool_"
"""Followed by the number of a replica that joined while the run went on."""


RolesByPool = dict[str, dict[str, ClassWithInitArgs]]
"""For each pool the roles in it, by the names that their groups have."""


def pool_of(config: PPOConfig, section: str) -> str:
    """The pool of a role: one of its own if `resource_pool.<section>.devices` is set."""
    return POOL if pool_devices(config, section) is None else f"{section}_pool"


def make_pools(
    config: PPOConfig, mapping: Mapping[Role, str], controller: Controller, device: str
) -> PoolManager[Any]:
    """The pools that the roles are mapped to, on the machines that the configuration names."""
    trainer, model = config.trainer, config.reward_model
    rollout = config.actor_rollout_ref.rollout
    spec: dict[str, list[int]] = {}
    for name in dict.fromkeys(mapping.values()):
        devices = pool_devices(config, name.removesuffix("_pool"))
        if name == REWARD_POOL:
            spec[name] = [model.n_gpus_per_node] * model.nnodes
        elif devices is not None:
            spec[name] = per_node(devices, trainer.n_gpus_per_node)
        elif name == ROLLOUT_POOL:
            spec[name] = [rollout.n_gpus_per_node] * rollout.nnodes
        elif name == TEACHER_POOL:
            spec[name] = [config.distillation.n_gpus_per_node] * config.distillation.nnodes
        else:
            spec[name] = [trainer.n_gpus_per_node] * trainer.nnodes
    options = {} if controller is LOCAL else {"use_gpu": device != "cpu"}
    return controller.resource_pool_manager(spec, dict(mapping), **options)


def per_node(devices: list[int], devices_per_node: int) -> list[int]:
    """How many of the devices each node has; nodes with none are left out."""
    nodes = [device // devices_per_node for device in devices]
    return [nodes.count(node) for node in sorted(set(nodes))]


def devices_of(config: PPOConfig, pool_name: str) -> list[int] | None:
    """The devices of this machine that a pool has to itself; None if it shares all."""
    if pool_name == ROLLOUT_POOL and ranks_beside(config):
        first = world_size(config)  # behind those of the trainer
        return list(range(first, first + ranks_beside(config)))
    after_rollout = world_size(config) + ranks_beside(config)
    if pool_name == TEACHER_POOL:
        return list(range(after_rollout, after_rollout + teacher_ranks(config)))
    if pool_name.startswith(JOINED_POOL):
        size = ranks_per_engine(config.actor_rollout_ref.rollout)
        number = int(pool_name.removeprefix(JOINED_POOL))
        first = after_rollout + teacher_ranks(config) + number * size
        return list(range(first, first + size))
    return pool_devices(config, pool_name.removesuffix("_pool"))


class Placer:
    """Starts the worker groups of a run."""

    def __init__(
        self,
        config: PPOConfig,
        pools: PoolManager[Any],
        controller: Controller,
        group_class: Callable[..., Any],
        device: str,
    ) -> None:
        self.config = config
        self.pools = pools
        self.controller = controller
        self.group_class = group_class
        self.device = device
        self._started: list[Any] = []

    def start(self, roles: RolesByPool) -> dict[str, Any]:
        """A group for each role. The first pool is the policy's."""
        groups: dict[str, Any] = {}
        main_pool = next(iter(roles))
        for name, classes in roles.items():
            pool = self.pools.resource_pool_dict[name]
            if self.controller is LOCAL and name == main_pool and pool.world_size == 1:
                for role, spec in classes.items():
                    groups[role] = self._launch(pool, spec, role)
            else:
                groups.update(self._launch_together(name, classes))
        return groups

    def start_further(
        self, pool_name: str, processes: list[int], classes: dict[str, ClassWithInitArgs]
    ) -> dict[str, Any]:
        """A group for each role in a pool of its own, beside those that run."""
        self.pools.add_pool(pool_name, processes)
        try:
            return self._launch_together(pool_name, classes)
        except BaseException:
            self.pools.remove_pool(pool_name)
            raise

    def start_beside(self, pool_name: str, role: str, spec: ClassWithInitArgs) -> Any:
        """A further group on the devices of a pool, in processes of its own."""
        return self._launch_together(pool_name, {role: spec})[role]

    def stop_further(self, pool_name: str) -> None:
        """End the processes of such a pool and give it back."""
        pool = self.pools.resource_pool_dict[pool_name]
        for group in [group for group in self._started if group.resource_pool is pool]:
            self._started.remove(group)
            group.shutdown()
        self.pools.remove_pool(pool_name)

    def stop(self) -> None:
        """End all processes and give back what the pools hold."""
        for group in self._started:
            group.shutdown()
        for pool in self.pools.resource_pool_dict.values():
            pool.release()

    def _launch_together(self, pool_name: str, classes: dict[str, ClassWithInitArgs]) -> Any:
        together = self.controller.create_colocated_worker_cls(classes)
        options: dict[str, Any] = {"worker_env": self._worker_env(pool_name)}
        if self.controller is LOCAL:
            options["in_process"] = False
        pool = self.pools.resource_pool_dict[pool_name]
        # Names are unique in a cluster, and those of a run that has just died may still be taken.
        group = self._launch(pool, together, f"{pool_name}_{uuid.uuid4().hex[:6]}_", **options)
        return group.spawn(classes)

    def _launch(self, pool: Any, spec: ClassWithInitArgs, name: str, **options: Any) -> Any:
        group = self.group_class(
            pool,
            spec,
            name_prefix=name,
            device_name=self.device,
            call_timeout_seconds=self.config.trainer.worker_timeout,
            **options,
        )
        self._started.append(group)
        return group

    def _worker_env(self, pool_name: str) -> dict[str, str]:
        """Ranks compute on the run's kind of device, whatever else their machine has."""
        variables = {"VERL_FORCE_DEVICE": self.device}
        if self.device == "cpu" and not has_chosen_threads():
            # Ranks of one machine share its cores; each taking all of them is much slower.
            num_ranks = sum(sum(counts) for counts in self.pools.resource_pool_spec.values())
            variables["OMP_NUM_THREADS"] = str(max(1, usable_cores() // num_ranks))
        devices = devices_of(self.config, pool_name)
        if self.controller is LOCAL and self.device != "cpu" and devices is not None:
            variables[get_visible_devices_keyword()] = ",".join(map(str, devices))
        return variables
