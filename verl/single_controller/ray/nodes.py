"""Asking about processes on the nodes of the cluster, while the actors there cannot answer.

Each actor is asked once, when it starts, for its pid and node. Later questions (is it stopped?
where does it stand?) go to a small task on that node, or are answered here when it is the driver's
node. Best effort: a node that does not answer in time gives the given default.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.single_controller.base import process_probe
from verl.single_controller.base.process_probe import ProcessAddress

Answer = TypeVar("Answer")
NODE_ANSWER_SECONDS = 10.0


class ActorAddress(NamedTuple):
    process: ProcessAddress
    node_id: str
    node_ip: str


def announce_actor(worker: Any) -> ActorAddress:
    """Runs in the actor."""
    process = process_probe.announce(all_threads=True)
    node_id = ray.get_runtime_context().get_node_id()
    return ActorAddress(process, node_id, ray.util.get_node_ip_address())


def stopped_pids(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if process_probe.is_stopped(pid)]


def ask_node(
    node_id: str, question: Callable[..., Answer], argument: Any, default: Answer
) -> Answer:
    """`question(argument)`, asked on a node of the cluster."""
    if node_id == ray.get_runtime_context().get_node_id():
        return question(argument)
    strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    task: Any = ray.remote(question).options(num_cpus=0, scheduling_strategy=strategy)
    try:
        return ray.get(task.remote(argument), timeout=NODE_ANSWER_SECONDS)
    except RayError:  # the node is lost or too busy; that is an answer too
        return default
