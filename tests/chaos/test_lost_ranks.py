"""Ranks killed, stopped or hanging in each phase: noticed, replaced, and the run ends the same."""

import os
import signal

import pytest

from tests.chaos.strikes import HANG, Strike, Strikes, wait_until_gone
from tests.chaos.table import rows_of
from tests.chaos.victims import StruckTrainer, VictimRunner
from tests.single_controller.workers import Calculator
from tests.toy import ACTOR, toy_run
from tests.trainer.test_ranks import assert_same_run, comparable
from verl.single_controller import ClassWithInitArgs, ResourcePool, WorkerTimeout
from verl.single_controller.local import LocalWorkerGroup

LIMITS = {"kill -9": 5.0, "SIGSTOP": 30.0, "hang": 30.0}
BY_ITSELF = ("generate", "old log-prob", "update", "weight sync", "save")
PAIR = (
    "trainer.n_gpus_per_node=2",
    "trainer.controller=local",
    f"{ACTOR}.fsdp_config.sharding=full",  # the rollout has a copy, which is sent its weights
)
CRITIC_APART = (
    "algorithm.adv_estimator=gae",
    "trainer.n_gpus_per_node=2",
    "trainer.controller=local",
    "resource_pool.actor_rollout_ref.devices=[0]",  # in this process
    "resource_pool.critic.devices=[1]",
)


def lasting(num_strikes):
    """A step for each strike, after one that is committed."""
    return (
        f"trainer.total_training_steps={num_strikes + 1}",
        "trainer.save_freq=1",
        f"trainer.max_restarts={num_strikes}",
    )


def struck_run(toy, output, changes, strikes):
    """What the run reported, a row for each strike, and the processes that are left."""
    book = Strikes(toy)
    book.plan(strikes)
    try:
        found, trainer = toy_run(
            toy, output, *changes, trainer_class=StruckTrainer, runner_class=VictimRunner
        )
        trainer.stop_workers()
    finally:
        rows = rows_of(book, "child processes", LIMITS)
    return comparable(found), rows, wait_until_gone(book.pids())


def uninterrupted_run(toy, output, changes):
    found, trainer = toy_run(toy, output, *changes)
    trainer.stop_workers()
    return comparable(found)


def assert_kept(rows):
    assert [row for row in rows if not row.is_kept] == []


def assert_named(rows, role):
    for row in rows:
        assert role in row.message, row.message
        assert f"rank {row.who[-1]} (pid " in row.message


def actor_strikes(number):
    alone = [Strike("actor", 1, phase, step, number) for step, phase in enumerate(BY_ITSELF, 2)]
    return [*alone, Strike("actor", 1, "reward", 7, number, stage="score")]


def critic_strikes(number):
    return [
        Strike("critic", 0, "generate", 2, number, stage="rollout"),
        Strike("critic", 0, "reward", 3, number, stage="score"),
        Strike("critic", 0, "old log-prob", 4, number),
        Strike("critic", 0, "update", 5, number),
        Strike("critic", 0, "weight sync", 6, number, stage="update_actor"),
        Strike("critic", 0, "save", 7, number),
    ]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize(
    ("make_strikes", "placement", "name"),
    [(actor_strikes, PAIR, "actor_rollout"), (critic_strikes, CRITIC_APART, "critic")],
    ids=["actor", "critic in its own pool"],
)
def test_a_rank_may_be_lost_in_any_phase(own_toy, tmp_path, number, make_strikes, placement, name):
    strikes = make_strikes(number)
    changes = (*placement, *lasting(len(strikes)))
    expected = uninterrupted_run(own_toy, tmp_path / "straight", changes)
    found, rows, left = struck_run(own_toy, tmp_path / "struck", changes, strikes)
    assert_kept(rows)
    assert_named(rows, name)
    assert found == expected
    assert left == []


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_critic_is_replaced_and_the_run_ends_the_same(own_toy, tmp_path):
    changes = ("algorithm.adv_estimator=gae", *lasting(1))
    expected, _ = toy_run(own_toy, tmp_path / "straight", *changes)  # all in this process
    strikes = [Strike("critic", 0, "update", 2)]
    found, rows, left = struck_run(own_toy, tmp_path / "struck", (*changes, *CRITIC_APART), strikes)
    assert_kept(rows)
    assert_named(rows, "critic")
    assert "update_critic" in rows[0].message
    assert "killed by SIGKILL" in rows[0].message
    assert_same_run(found, expected)
    assert left == []


@pytest.mark.slow
def test_a_stopped_rank_is_given_up_at_the_deadline_and_ended_with_its_group():
    group = LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Calculator), in_process=False)
    (pid,) = group.where()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerTimeout, match=rf"rank 0 \(pid {pid}\): stopped by a signal"):
        group.with_deadline(1.0).add(1)
    group.shutdown()
    assert wait_until_gone([pid]) == []


@pytest.mark.slow
def test_a_rank_that_hangs_is_ended_at_the_deadline_of_a_call(own_toy, tmp_path):
    strikes = [Strike("critic", 0, "update", 2, HANG)]
    changes = (*CRITIC_APART, *lasting(1), "trainer.worker_timeout=20")
    found, rows, left = struck_run(own_toy, tmp_path, changes, strikes)
    assert_kept(rows)
    assert "update_critic: no answer within 20 s" in rows[0].message
    assert "in strike_here" in rows[0].message  # its stack says where it hangs
    assert len(found) == 2
    assert left == []
