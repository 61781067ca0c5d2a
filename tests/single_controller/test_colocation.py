"""Several roles in one process per rank, the same on every back-end."""

import pytest
import torch

from tests.single_controller.workers import Actor, AsyncCritic, Critic
from verl import DataProto
from verl.single_controller import ClassWithInitArgs
from verl.single_controller.base.colocation import colocated_class, fused_class


def test_roles_share_a_process_and_keep_their_own_methods(launcher):
    roles = {"actor": launcher.spec(Actor, "leader"), "critic": launcher.spec(Critic, base=50)}
    spec = launcher.controller.create_colocated_worker_cls(roles)
    group = launcher.start_spec(spec)
    ranks = range(launcher.world_size)
    assert group.actor_who() == [f"leader {rank}" for rank in ranks]

    spawned = group.spawn(roles.keys())
    actor, critic = spawned["actor"], spawned["critic"]
    del group  # the roles keep the processes alive
    assert actor.who() == [f"leader {rank}" for rank in ranks]
    assert critic.who() == [f"critic {rank}" for rank in ranks]
    assert critic.value() == [50 + rank for rank in ranks]
    assert critic.ask_actor() == [f"leader {rank}" for rank in ranks]
    assert actor.init_flag() == [None] * launcher.world_size  # only set while roles are built

    batch = DataProto.from_dict({"x": torch.arange(4)})
    assert actor.update(batch).batch["x"].tolist() == [1, 2, 3, 4]  # its own mesh
    assert actor.with_deadline(30).update(batch).batch["x"].tolist() == [1, 2, 3, 4]
    with pytest.raises(RuntimeError, match=r"'critic', ask_actor.*unexpected keyword"):
        critic.ask_actor(loudly=True)


def test_fused_roles_are_attributes_of_the_group(launcher):
    roles = {"actor": launcher.spec(Actor), "critic": launcher.spec(AsyncCritic, base=50)}
    spec = launcher.controller.create_colocated_worker_cls_fused(roles)
    assert spec.fused_worker_used
    assert spec.worker_class.__name__ == "FusedWorker_actor_critic"
    group = launcher.start_spec(spec)
    group.fuse(roles.keys())
    ranks = range(launcher.world_size)
    assert group.actor.who() == [f"actor {rank}" for rank in ranks]
    assert group.critic.ask_actor() == [f"actor {rank}" for rank in ranks]
    assert group.critic.value_soon() == [50 + rank for rank in ranks]
    assert group.with_deadline(30).critic.value() == [50 + rank for rank in ranks]
    batch = DataProto.from_dict({"x": torch.arange(4)})
    assert group.actor.update(batch).batch["x"].tolist() == [1, 2, 3, 4]


def test_role_names_may_be_prefixes_of_each_other():
    roles = {"actor": ClassWithInitArgs(Actor), "actor_rollout": ClassWithInitArgs(Critic, base=1)}
    members = vars(colocated_class(roles))
    assert {"actor_who", "actor_rollout_who", "actor_rollout_value"} <= members.keys()


@pytest.mark.parametrize("build", [colocated_class, fused_class])
def test_nothing_cannot_be_colocated(build):
    with pytest.raises(ValueError, match="class_dict is empty"):
        build({})
