"""A run whose rollout engine has a process of its own is the run of the built-in engine, whatever
happens to the process."""

import os
import signal
import threading
from pathlib import Path

import pytest

from tests.toy import ACTOR, ROLLOUT, toy_run
from tests.trainer.test_ranks import TWO_LOCAL, KeepsResponses, assert_same_run
from verl.agent_loop import AsyncLLMServerManager
from verl.workers.rollout.base import Rollout

APART = f"{ROLLOUT}.name=native_process"
OF_ENGINES = ("rollout/canary_max_diff", "rollout/engine_restarts", "rollout/redispatched")
STEPS = ("trainer.total_training_steps=3", "trainer.val_before_train=true")


def without_engine_metrics(metrics):
    return [{k: v for k, v in step.items() if k not in OF_ENGINES} for step in metrics]


def total(metrics, name):
    return sum(step.get(name, 0) for step in metrics)


def signal_engine(process, number):
    os.kill(process.pid, number)


class Unlucky(Rollout):
    """Passes everything on to an engine's process, and kills it once while it serves."""

    def __init__(self, process):
        self.process = process
        self.is_due = False
        self.num_submitted = 0

    @property
    def policy_version(self):
        return self.process.policy_version

    @property
    def num_restarts(self):
        return self.process.num_restarts

    def is_alive(self):
        return self.process.is_alive()

    def submit(self, request, on_end=None):
        if not self.is_due:
            return self.process.submit(request, on_end)
        self.num_submitted += 1
        signal_engine(self.process, signal.SIGSTOP)  # so that nothing is finished
        answer = self.process.submit(request, on_end)
        if self.num_submitted == 2:
            signal_engine(self.process, signal.SIGKILL)
            self.is_due = False
        return answer

    def abort(self, request_id):
        self.process.abort(request_id)

    def close_session(self, session_id):
        self.process.close_session(session_id)

    def sleep(self):
        self.process.sleep()

    def wake_up(self):
        self.process.wake_up()


def make_unlucky(trainer):
    """The engine of `trainer` is killed while it serves next."""
    manager = trainer.async_rollout_manager
    (process,) = manager.rollout_replicas
    unlucky = Unlucky(process)
    unlucky.is_due = True
    manager.rollouter.servers = AsyncLLMServerManager(
        manager.config, [unlucky], recover=trainer.publisher.recover
    )
    return unlucky


class LosesItsEngine(KeepsResponses):
    """While it serves in step 2."""

    def rollout(self, step):
        if self.global_steps == 2:
            make_unlucky(self)
        return super().rollout(step)


class LosesEnginesOfRanks(KeepsResponses):
    """One while it serves in step 2, the last of them while it is idle in step 3."""

    def rollout(self, step):
        first, *_, last = engines_of_ranks(self.rollout_wg)
        if self.global_steps == 3:
            os.kill(last, signal.SIGKILL)
        if self.global_steps != 2:
            return super().rollout(step)
        os.kill(first, signal.SIGSTOP)  # so that it has unfinished requests when it dies
        death = threading.Timer(1.0, os.kill, (first, signal.SIGKILL))
        death.start()
        try:
            return super().rollout(step)
        finally:
            death.join(timeout=10)


def engines_of_ranks(group):
    """The processes of engines that the ranks have started, in the order of the ranks; twice the
    same if there is one."""
    found = []
    for worker in group.workers:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (folder / "cmdline").read_text()
            except OSError:  # it has just ended
                continue
            if fields[1] == str(worker.pid) and "rollout.process.host" in command:
                found.append(int(folder.name))
    assert len(found) == len(group.workers)
    return found if len(found) > 1 else found * 2


@pytest.fixture(scope="module")
def undisturbed(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return toy_run(toy, folder, *STEPS, trainer_class=KeepsResponses)


def assert_undisturbed(found, trainer, undisturbed):
    expected, built_in = undisturbed
    assert trainer.seen == built_in.seen
    assert_same_run(without_engine_metrics(found), expected)
    assert all(step["rollout/canary_max_diff"] < 1e-4 for step in found if step["step"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_that_is_lost_while_it_serves_changes_nothing(toy, tmp_path, undisturbed):
    found, trainer = toy_run(toy, tmp_path, *STEPS, APART, trainer_class=LosesItsEngine)
    trainer.stop_workers()
    assert_undisturbed(found, trainer, undisturbed)
    assert total(found, "rollout/redispatched") == 16
    assert total(found, "rollout/engine_restarts") == 1


@pytest.mark.parametrize("ranks", [(), pytest.param(TWO_LOCAL, marks=pytest.mark.slow)])
def test_generate_of_transformers_gives_the_run_of_the_built_in_engine(
    ranks, toy, tmp_path, undisturbed
):
    expected, built_in = undisturbed
    name = f"{ROLLOUT}.name=hf"
    found, trainer = toy_run(toy, tmp_path, *STEPS, name, *ranks, trainer_class=KeepsResponses)
    trainer.stop_workers()
    assert trainer.seen == built_in.seen
    assert_same_run(found, expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sharding", ["full", "zero1"])
def test_ranks_whose_engines_are_lost_train_as_one_without_does(
    sharding, toy, tmp_path, undisturbed
):
    changes = (*STEPS, APART, *TWO_LOCAL, f"{ACTOR}.fsdp_config.sharding={sharding}")
    found, trainer = toy_run(toy, tmp_path, *changes, trainer_class=LosesEnginesOfRanks)
    trainer.stop_workers()
    assert_undisturbed(found, trainer, undisturbed)
    assert total(found, "rollout/redispatched") > 0
    assert total(found, "rollout/engine_restarts") == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rollout_with_ranks_of_its_own_recovers_its_engines(toy, tmp_path, undisturbed):
    changes = (
        *STEPS,
        APART,
        "trainer.controller=local",
        "actor_rollout_ref.hybrid_engine=false",
        f"{ROLLOUT}.nnodes=1",
        f"{ROLLOUT}.n_gpus_per_node=2",
    )
    found, trainer = toy_run(toy, tmp_path, *changes, trainer_class=LosesEnginesOfRanks)
    trainer.stop_workers()
    assert_undisturbed(found, trainer, undisturbed)
    assert total(found, "rollout/redispatched") > 0
    assert total(found, "rollout/engine_restarts") == 2
