"""A run on several ranks is the run on one: same samples, same rewards, same updates."""

import math
import os
import signal

import pytest

from tests.toy import ACTOR, KeepsTrainer, toy_run
from tests.utils.sockets import LOOPBACK, listening_sockets, new_addresses
from verl.single_controller.base.failures import WorkerDied
from verl.trainer.ppo.placing import POOL
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.ppo.utils import Role
from verl.workers.roles import ActorRolloutRefWorker

TWO_LOCAL = ("trainer.n_gpus_per_node=2", "trainer.controller=local")
EVERYTHING = (
    "algorithm.adv_estimator=gae",  # a critic
    "algorithm.use_kl_in_reward=true",  # a reference
    f"{ACTOR}.ppo_mini_batch_size=2",  # two optimizer steps
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
    "critic.ppo_micro_batch_size_per_gpu=2",
    "trainer.val_before_train=true",
)
DEPENDS_ON_RANKS = ("timing_", "perf/", "global_seqlen/", "agent_loop/")


def comparable(metrics):
    """What must not depend on where the run takes place."""
    return [
        {k: v for k, v in step.items() if not k.startswith(DEPENDS_ON_RANKS)} for step in metrics
    ]


def assert_same_run(found, expected):
    assert [step.keys() for step in comparable(found)] == [
        step.keys() for step in comparable(expected)
    ]
    for step, other in zip(comparable(found), comparable(expected), strict=True):
        for name, value in step.items():
            assert math.isclose(value, other[name], rel_tol=1e-4, abs_tol=1e-5), name


class KeepsResponses(PPOTrainer):
    """Lets a test see what was sampled, and where the run listens amid a step."""

    def update(self, batch, step):
        self.sockets = listening_sockets(os.getpid())
        self.seen = [*getattr(self, "seen", []), batch.batch["responses"].tolist()]
        return super().update(batch, step)


def test_two_ranks_train_as_one_does(toy, tmp_path):
    before = listening_sockets(os.getpid())
    expected, alone = toy_run(toy, tmp_path / "one", *EVERYTHING, trainer_class=KeepsResponses)
    found, pair = toy_run(
        toy, tmp_path / "two", *EVERYTHING, *TWO_LOCAL, trainer_class=KeepsResponses
    )
    pair.stop_workers()
    assert pair.actor_rollout_wg.world_size == pair.critic_wg.world_size == 2
    assert len(pair.async_rollout_manager.rollout_replicas) == 2
    assert pair.seen == alone.seen
    assert new_addresses(alone.sockets, before) == set()
    # Those of gloo: two ranks reach each other through them, and meet in a file.
    assert new_addresses(pair.sockets, before) == {LOOPBACK}
    assert_same_run(found, expected)


class LosesAWorkerOnce(PPOTrainer):
    """As when a process dies amid an update: all calls of the step raise."""

    has_lost = False

    def update(self, batch, step):
        if self.global_steps == 2 and not LosesAWorkerOnce.has_lost:
            LosesAWorkerOnce.has_lost = True
            raise WorkerDied("rank 1 died")
        return super().update(batch, step)


@pytest.mark.parametrize("save_freq", [1, pytest.param(-1, marks=pytest.mark.slow)])
def test_a_run_that_loses_a_worker_ends_as_if_nothing_had_happened(toy, tmp_path, save_freq):
    LosesAWorkerOnce.has_lost = False
    changes = ("trainer.total_training_steps=3", f"trainer.save_freq={save_freq}")
    expected, _ = toy_run(toy, tmp_path / "straight", *changes)
    found, trainer = toy_run(
        toy,
        tmp_path / "broken",
        *changes,
        "trainer.resume_mode=disable",
        trainer_class=LosesAWorkerOnce,
    )
    assert LosesAWorkerOnce.has_lost
    steps = [1, 2, 3] if save_freq == 1 else [1, 1, 2, 3]  # without a commit, from the beginning
    assert [step["step"] for step in found] == steps
    assert_same_run(found[-3:], expected)
    assert trainer.global_steps == 3


class AlwaysLosesAWorker(PPOTrainer):
    num_attempts = 0

    def fit(self):
        AlwaysLosesAWorker.num_attempts += 1
        raise WorkerDied("rank 1 died")


def test_a_run_whose_workers_keep_dying_gives_up(toy, tmp_path):
    with pytest.raises(WorkerDied, match="rank 1 died"):
        toy_run(toy, tmp_path, "trainer.max_restarts=2", trainer_class=AlwaysLosesAWorker)
    assert AlwaysLosesAWorker.num_attempts == 3


class KillsARankOnce(PPOTrainer):
    """A real death, by SIGKILL, while the rank trains."""

    has_killed = False

    def update(self, batch, step):
        if self.global_steps == 2 and not KillsARankOnce.has_killed:
            KillsARankOnce.has_killed = True
            os.kill(self.actor_rollout_wg.workers[1].pid, signal.SIGKILL)
        return super().update(batch, step)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_rank_is_replaced_and_the_run_continues_from_its_last_commit(
    toy, tmp_path, caplog
):
    changes = ("trainer.total_training_steps=3", "trainer.save_freq=1")
    expected, _ = toy_run(toy, tmp_path / "straight", *changes)
    found, broken = toy_run(
        toy, tmp_path / "broken", *changes, *TWO_LOCAL, trainer_class=KillsARankOnce
    )
    broken.stop_workers()
    assert KillsARankOnce.has_killed
    assert "actor_rollout', update_actor: rank 1 (pid " in caplog.text
    assert "killed by SIGKILL" in caplog.text
    assert "starting the workers anew, after step 1" in caplog.text
    assert [step["step"] for step in found] == [1, 2, 3]
    assert_same_run(found, expected)


@pytest.mark.slow
def test_a_critic_may_have_ranks_of_its_own(toy, tmp_path):
    apart = (
        "trainer.n_gpus_per_node=3",
        "trainer.controller=local",
        "resource_pool.actor_rollout_ref.devices=[0,1]",
        "resource_pool.critic.devices=[2]",
    )
    expected, _ = toy_run(toy, tmp_path / "one", *EVERYTHING)
    found, trainer = toy_run(toy, tmp_path / "apart", *EVERYTHING, *apart)
    trainer.stop_workers()
    assert trainer.actor_rollout_wg.world_size == 2
    assert trainer.critic_wg.world_size == 1
    assert_same_run(found, expected)


@pytest.mark.slow
def test_ranks_that_divide_the_weights_train_as_one_does(toy, tmp_path):
    full = (f"{ACTOR}.fsdp_config.sharding=full", "critic.model.fsdp_config.sharding=full")
    expected, _ = toy_run(toy, tmp_path / "one", *EVERYTHING)
    found, pair = toy_run(toy, tmp_path / "two", *EVERYTHING, *TWO_LOCAL, *full)
    pair.stop_workers()
    assert_same_run(found, expected)


class ReferenceApart(KeepsTrainer):
    """A runner that gives the reference a worker of its own."""

    def add_actor_rollout_worker(self, config):
        _, group_class = super().add_actor_rollout_worker(config)
        del self.role_worker_mapping[Role.ActorRolloutRef], self.mapping[Role.ActorRolloutRef]
        self.role_worker_mapping[Role.ActorRollout] = ActorRolloutRefWorker
        self.mapping[Role.ActorRollout] = POOL
        return ActorRolloutRefWorker, group_class

    def add_ref_policy_worker(self, config, ref_policy_cls):
        self.role_worker_mapping[Role.RefPolicy] = ref_policy_cls
        self.mapping[Role.RefPolicy] = POOL


def test_a_reference_may_have_a_worker_of_its_own(toy, tmp_path):
    changes = ("algorithm.use_kl_in_reward=true", "trainer.total_training_steps=2")
    expected, beside = toy_run(toy, tmp_path / "beside", *changes)
    found, apart = toy_run(toy, tmp_path / "apart", *changes, runner_class=ReferenceApart)
    assert beside.ref_in_actor
    assert not apart.ref_in_actor
    assert not apart.actor_rollout_wg.workers[0].is_ref
    assert not apart.ref_policy_wg.workers[0].is_actor
    assert_same_run(found, expected)
