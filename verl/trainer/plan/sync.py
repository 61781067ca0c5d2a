"""How long an update of the rollout's weights takes: bytes over the slowest link on their way.

    shared      the engine generates with the trained weights            0
    gathered    every rank gets all weights in a ring of all-gathers     bytes / slowest link
    sent        each sending rank serves its share of the engines        bytes * rounds / network

The bandwidths are assumptions, named with the result; measured updates are in docs/weight_sync.md.
"""

from dataclasses import dataclass
from typing import Any

from verl.config.roles import (
    engine_has_whole_weights,
    ranks_beside,
    replicas,
    rollout_traits,
    world_size,
)
from verl.trainer.plan.shape import ModelShape

IN_NODE = 150e9
"""Bytes per second of a collective between devices of a node: a third of NVLink's 450 GB/s."""

BETWEEN_NODES = 25e9
"""Bytes per second between two nodes: half of a 400 Gb/s link."""


@dataclass(frozen=True)
class SyncPlan:
    """What one update moves, and how."""

    how: str
    num_bytes: float
    seconds: float


def sync_plan(config: Any, shape: ModelShape) -> SyncPlan:
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    is_hybrid = config.actor_rollout_ref.hybrid_engine
    if is_hybrid and rollout.name == "native" and engine_has_whole_weights(config):
        return SyncPlan("the engine generates with the trained weights", 0.0, 0.0)
    num_bytes = shape.params * (4.0 if trainer.device == "cpu" else 2.0)
    is_wide = trainer.nnodes > 1
    link = BETWEEN_NODES if is_wide else IN_NODE
    if is_hybrid:
        how = "gathered tensor by tensor on every rank"
        how += (
            ", handed to the engine's process"
            if not rollout_traits(rollout.name).is_builtin
            else ""
        )
        return SyncPlan(how, num_bytes, num_bytes / link)
    senders = world_size(config)
    rounds = -(-replicas(config) // senders)
    link = BETWEEN_NODES if is_wide or ranks_beside(config) else IN_NODE
    how = f"gathered, then sent by {senders} ranks to {replicas(config)} engines"
    return SyncPlan(how, num_bytes, num_bytes / link * (1 + rounds))
