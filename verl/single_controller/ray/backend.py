"""Ranks as Ray actors. A reference is Ray's own, so users may `ray.get` it or pass it on.

Ray reports a dead actor by failing all its pending calls at once. It does not report a stopped
process; for that, and for the stack of a silent one, the node is asked: each actor gives its pid
and node once, when it starts, and later questions go to a small task on that node, or are answered
here when it is the driver's node. A node that does not answer in time gives the default. Actor
calls are not retried (Ray's default), so a method runs at most once per call.
"""

import os
import re
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import TensorDictBase
from torch import Tensor

from verl.protocol import DataProto
from verl.single_controller.base.backend import Backend, Call, Outcome, RankCall
from verl.single_controller.base.failures import Failure, first_line, summary_of
from verl.utils import processes as process_probe
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

    def dead_ranks(self) -> list[int]:
        """By name; nothing is known of actors without one until they are called."""
        alive = set(ray.util.list_named_actors())
        return [rank for rank, name in enumerate(self.names) if name not in alive]

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
