"""`RayWorkerGroup`: the ranks are actors, one in each bundle of a resource pool.

`Launch` starts them: where each rank goes, its name and its environment. Ray shows a worker only
its own device, so `LOCAL_RANK` (the number of the device among the visible ones) is 0 on GPUs; on a
CPU it is the rank on the node. The ranks meet at an address that is chosen on the node of rank 0,
before any actor starts. Actors end with the driver, or when nobody holds the group any more, unless
they are `detached`; detached ones are found again with `from_detached`.

Ranks as Ray actors. A reference is Ray's own, so users may `ray.get` it or pass it on.

Ray reports a dead actor by failing all its pending calls at once. It does not report a stopped
process; for that, and for the stack of a silent one, the node is asked: each actor gives its pid
and node once, when it starts, and later questions go to a small task on that node, or are answered
here when it is the driver's node. A node that does not answer in time gives the default. Actor
calls are not retried (Ray's default), so a method runs at most once per call.
"""

import os
import re
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)
from tensordict import TensorDictBase
from torch import Tensor

from verl.protocol import DataProto
from verl.single_controller.base.backend import (
    DEFAULT_CALL_TIMEOUT_SECONDS,
    Backend,
    Call,
    Outcome,
    RankCall,
)
from verl.single_controller.base.failures import Failure, first_line, summary_of
from verl.single_controller.base.worker import available_master_addr_port
from verl.single_controller.base.worker_group import WorkerGroup
from verl.single_controller.ray.actors import RayClassWithInitArgs
from verl.single_controller.ray.resource_pool import (
    RayResourcePool,
    Strategy,
    SubRayResourcePool,
    node_of_bundle,
)
from verl.utils import processes as process_probe
from verl.utils.environment import temp_env_var
from verl.utils.processes import ProcessAddress
from verl.utils.ray_utils import parallel_put

LARGE_TYPES = (DataProto, TensorDictBase, Tensor, np.ndarray)

FETCH_SECONDS = 300.0
"""How long to fetch a result that exists from another node."""

HEARING_SECONDS = 0.5
"""What ranks that have not started yet may delay the first message that names them."""
NODE_ANSWER_SECONDS = 10.0


Reply = TypeVar("Reply")


class ActorAddress(NamedTuple):
    process: ProcessAddress
    node_id: str
    node_ip: str


class RayBackend(Backend):
    reference_type = ray.ObjectRef

    def __init__(
        self, workers: Sequence[ActorHandle], names: Sequence[str], *, owned: bool, lasting: bool
    ) -> None:
        """`owned` actors are ended by `shutdown`; unless `lasting`, also when nobody holds them."""
        super().__init__()
        self.workers = list(workers)
        self.names = list(names)
        self._owned = owned
        self._addresses: dict[int, ActorAddress] = {}
        self._hearing_seconds = HEARING_SECONDS
        self._announcements = [worker.__ray_call__.remote(announce_actor) for worker in workers]
        if owned and not lasting:
            weakref.finalize(self, kill_actors, self.workers, os.getpid())

    def submit(self, call: Call, method: str, rank_calls: Sequence[RankCall]) -> list[Any]:
        stored = put_common_batches(rank_calls)
        references = []
        for rank, args, kwargs in rank_calls:
            args = [stored.get(id(value), value) for value in args]
            kwargs = {key: stored.get(id(value), value) for key, value in kwargs.items()}
            references.append(getattr(self.workers[rank], method).remote(*args, **kwargs))
        return references

    def wait(self, references: Sequence[Any], timeout_seconds: float) -> list[int]:
        pending = list(references)
        ready, _ = ray.wait(pending, num_returns=1, timeout=timeout_seconds)
        if ready and len(pending) > 1:
            # Looking at n references costs n; a pause lets answers gather, so n of them cost less.
            time.sleep(min(1e-5 * len(pending), 0.02))
            ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        found = set(ready)
        return [index for index, reference in enumerate(references) if reference in found]

    def outcomes(self, references: Sequence[Any]) -> list[Outcome]:
        try:
            return [Outcome(value) for value in ray.get(list(references), timeout=FETCH_SECONDS)]
        except RayError:  # at least one failed: look at each
            return [fetched(reference) for reference in references]

    def stopped_ranks(self, ranks: Sequence[int]) -> list[int]:
        known = {rank: address for rank in ranks if (address := self._address(rank))}
        by_node: dict[str, dict[int, int]] = {}  # node -> pid -> rank
        for rank, address in known.items():
            by_node.setdefault(address.node_id, {})[address.process.pid] = rank
        return [
            pids[pid]
            for node, pids in by_node.items()
            for pid in ask_node(node, stopped_pids, list(pids), default=[])
        ]

    def stack_of(self, rank: int) -> str:
        address = self._address(rank)
        if address is None:
            return "it has not started yet"
        question = process_probe.stack_of
        return ask_node(address.node_id, question, address.process, "its node does not answer")

    def deaths(self) -> dict[int, Failure]:
        """By name; nothing is known of actors without one until they are called."""
        alive = set(ray.util.list_named_actors())
        gone = Failure("its actor has ended", is_death=True)
        return {rank: gone for rank, name in enumerate(self.names) if name not in alive}

    def label(self, rank: int) -> str:
        address = self._address(rank)
        name = f"actor {self.names[rank]}" if self.names else "actor"
        if address is None:
            return f"rank {rank} ({name})"
        return f"rank {rank} ({name}, pid {address.process.pid} on {address.node_ip})"

    def share(self, parts: list[Any]) -> list[Any]:
        return parallel_put(parts)

    def shutdown(self) -> None:
        if not self.is_closed.is_set():
            self.is_closed.set()
            if self._owned:
                kill_actors(self.workers, os.getpid())

    def _address(self, rank: int) -> ActorAddress | None:
        if rank not in self._addresses:
            self._hear_announcements()
        return self._addresses.get(rank)

    def _hear_announcements(self) -> None:
        """The references that are ready. With a timeout of 0 Ray may miss some that are."""
        unheard = [rank for rank in range(len(self.workers)) if rank not in self._addresses]
        references = [self._announcements[rank] for rank in unheard]
        seconds, self._hearing_seconds = self._hearing_seconds, 0.0
        ready, _ = ray.wait(references, num_returns=len(references), timeout=seconds)
        found = set(ready)
        for rank, reference in zip(unheard, references, strict=True):
            outcome = fetched(reference) if reference in found else Outcome()
            if outcome.value is not None:
                self._addresses[rank] = outcome.value


def put_common_batches(rank_calls: Sequence[RankCall]) -> dict[int, Any]:
    """Put what is large and goes to several ranks into the object store once; by identity."""
    if len(rank_calls) < 2:
        return {}
    first, second = ((*args, *kwargs.values()) for _, args, kwargs in rank_calls[:2])
    common = {id(value) for value in first} & {id(value) for value in second}
    large = (value for value in first if isinstance(value, LARGE_TYPES))
    return {id(value): ray.put(value) for value in large if id(value) in common}


def fetched(reference: Any) -> Outcome:
    """What came of one finished call."""
    try:
        return Outcome(ray.get(reference, timeout=FETCH_SECONDS))
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else None
        return Outcome(failure=Failure(summary_of(cause or error), plain_text(error), cause))
    except RayActorError as error:
        if error.actor_init_failed:
            return Outcome(failure=Failure("its constructor failed", plain_text(error)))
        return Outcome(failure=Failure(death_text(error), is_death=True))
    except GetTimeoutError:
        return Outcome(failure=Failure(f"its result did not arrive within {FETCH_SECONDS:g} s"))
    except RayError as error:  # the object or its owner is lost, memory ran out
        return Outcome(failure=Failure(first_line(summary_of(error)), plain_text(error), error))


def death_text(error: RayActorError) -> str:
    """Ray's account of a death in one line, without the names that our own label gives."""
    lines = [line.strip() for line in plain_text(error).splitlines()]
    names = ("class_name:", "actor_id:", "name:", "namespace:")
    text = " ".join(line for line in lines if line and not line.startswith(names))
    return text.partition(" If the process was killed by the kernel OOM killer")[0]


def plain_text(error: RayError) -> str:
    return re.sub(r"\x1b\[[0-9]*m", "", str(error))  # Ray colours its messages


def kill_actors(workers: list[ActorHandle], driver_pid: int) -> None:
    if os.getpid() == driver_pid and ray.is_initialized():
        for worker in workers:
            ray.kill(worker)


def announce_actor(worker: Any) -> ActorAddress:
    """Runs in the actor."""
    process = process_probe.announce(all_threads=True)
    node_id = ray.get_runtime_context().get_node_id()
    return ActorAddress(process, node_id, ray.util.get_node_ip_address())


def stopped_pids(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if process_probe.is_stopped(pid)]


def ask_node(node_id: str, question: Callable[..., Reply], argument: Any, default: Reply) -> Reply:
    """`question(argument)`, asked on a node of the cluster."""
    if node_id == ray.get_runtime_context().get_node_id():
        return question(argument)
    strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    task: Any = ray.remote(question).options(num_cpus=0, scheduling_strategy=strategy)
    try:
        return ray.get(task.remote(argument), timeout=NODE_ANSWER_SECONDS)
    except RayError:  # the node is lost or too busy; that is an answer too
        return default


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
