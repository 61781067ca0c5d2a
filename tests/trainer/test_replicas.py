"""Rollout replicas join a run and leave it while it goes on, and it ends the same."""

import os
import signal
import time
from types import SimpleNamespace

import pytest

from tests.agent_loop.fakes import FakeRollout
from tests.toy import ROLLOUT, toy_run
from tests.trainer.test_async_placing import separate, straight, straight_by_two  # noqa: F401
from tests.trainer.test_asynchronous import Records
from tests.trainer.test_resume import same_weights
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.trainer.ppo.replicas import FILE, Replicas
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.ppo.utils import Role
from verl.workers.rollout.fleet import Fleet
from verl.workers.rollout.publish import SentWeights

PATIENCE_SECONDS = 120
pytestmark = pytest.mark.timeout(300)  # processes that start on busy cores take their time


class Operated(Records):
    """At the end of these steps an operator writes these numbers of engines; the run waits until
    what was asked for is up, so that it joins at the next step."""

    numbers: dict
    in_service: list
    requests: list

    def finish_step(self, batch, step):
        number = self.numbers.get(step.step)
        if number is not None:
            path = self.output / FILE
            path.write_text(f"{number}\n")
        super().finish_step(batch, step)
        wait_for_start(self)
        slots = self.async_rollout_manager.rollouter.servers.fleet.slots
        self.in_service.append(step.report.metrics.get("rollout/num_engines", 0))
        self.requests.append([slot.num_requests for slot in slots])


def wait_for_start(run):
    give_up = time.monotonic() + PATIENCE_SECONDS
    while run.replicas.is_starting and time.monotonic() < give_up:
        time.sleep(0.01)


def operated(toy, folder, numbers, *changes, cls=Operated, **fields):
    record = {"seen": [], "numbers": numbers, "output": folder, "in_service": [], "requests": []}
    kind = type("Operated", (cls,), {**record, **fields})
    changes = (*changes, f"trainer.default_local_dir={folder}")
    metrics, trainer = toy_run(toy, folder, *changes, trainer_class=kind)
    trainer.stop_workers()
    return kind, trainer, metrics


def test_a_replica_joins_and_leaves_and_the_run_is_the_same(toy, tmp_path, straight):  # noqa: F811
    numbers = {1: 2, 4: 1}
    kind, trainer, _ = operated(toy, tmp_path, numbers, *separate(tmp_path, "rank"))
    assert kind.in_service == [1, 2, 2, 1, 1, 1]
    assert min(kind.requests[2]) > 0  # both have worked
    assert [len(requests) for requests in kind.requests][-1] == 1
    assert kind.seen == straight[0]
    assert same_weights(trainer, straight[1])


class LosesReplica(Operated):
    """The ranks of a replica that has joined end while a step is trained, with requests."""

    def update(self, batch, step):
        batch = super().update(batch, step)
        if step.step == 3:
            (replica,) = self.replicas._replicas
            group = replica.started.result(timeout=0).group
            (worker,) = group.workers
            os.kill(worker.pid, signal.SIGKILL)
        return batch


@pytest.mark.slow
@pytest.mark.parametrize("place", ["rank", "processes"])
def test_a_replica_that_is_lost_is_replaced_and_the_run_is_the_same(
    toy,
    tmp_path,
    straight,  # noqa: F811
    place,
):
    num = 1 if place == "rank" else 2
    changes = separate(tmp_path, place)
    kind, trainer, _ = operated(toy, tmp_path, {1: num + 1}, *changes, cls=LosesReplica)
    assert kind.in_service == [num, num + 1, num, num + 1, num + 1, num + 1]
    assert kind.seen == straight[0]
    assert same_weights(trainer, straight[1])


@pytest.mark.slow
def test_engines_in_processes_of_their_own_join_between_two_updates(
    toy,
    tmp_path,
    straight_by_two,  # noqa: F811
):
    one = f"{ROLLOUT}.n_gpus_per_node=1"
    changes = (*separate(tmp_path, "processes", every=2), one)
    kind, trainer, _ = operated(toy, tmp_path, {2: 2, 4: 1}, *changes)
    assert kind.in_service[1:5] == [
        1,
        2,
        1,
        1,
    ]  # it joins after step 3, whose update is not published
    assert kind.seen == straight_by_two[0]
    assert same_weights(trainer, straight_by_two[1])


@pytest.mark.slow
def test_a_synchronous_run_takes_replicas_in_as_well(toy, tmp_path):
    apart = (
        "actor_rollout_ref.hybrid_engine=false",
        f"{ROLLOUT}.nnodes=1",
        f"{ROLLOUT}.n_gpus_per_node=1",
        f"{ROLLOUT}.exact=true",
        "trainer.controller=local",
        "trainer.total_training_steps=4",
    )
    runs = []
    for name, number in (("plain", 1), ("joined", 2)):
        folder = tmp_path / name
        folder.mkdir()
        local = (*apart, f"trainer.default_local_dir={folder}")

        class Asks(PPOTrainer):
            wanted = number

            def finish_step(self, batch, step):
                assert self.replicas is not None
                self.replicas.want(self.wanted)
                super().finish_step(batch, step)
                wait_for_start(self)

        metrics, trainer = toy_run(toy, folder, *local, trainer_class=Asks)
        trainer.stop_workers()
        runs.append((trainer, [step["rollout/num_engines"] for step in metrics if step]))
    assert runs[0][1] == [1, 1, 1, 1]
    assert runs[1][1] == [1, 2, 2, 2]
    assert same_weights(runs[0][0], runs[1][0])


def test_what_cannot_be_is_told_once_and_changes_nothing(toy, tmp_path, caplog):
    (tmp_path / FILE).write_text("3")
    toy_run(toy, tmp_path, f"trainer.default_local_dir={tmp_path}")
    (line,) = [record.getMessage() for record in caplog.records if FILE in record.getMessage()]
    assert "says '3', which changes nothing: no engine has ranks of its own" in line


class Offered:
    """What `Replicas` needs of a run; its groups start at once, or not."""

    def __init__(self, folder, *, fails=False):
        self.engines = [FakeRollout()]
        self.fleet = Fleet(self.engines)
        self.fails, self.started, self.stopped = fails, [], []
        config = load_config({"trainer": {"default_local_dir": str(folder)}}, PPOConfig).config
        servers = SimpleNamespace(fleet=self.fleet)
        manager = SimpleNamespace(rollouter=SimpleNamespace(servers=servers))
        publisher = SentWeights.__new__(SentWeights)  # joining is tested with real ranks
        publisher.join = publisher.leave = lambda engine: None
        self.replicas = Replicas(config, self, object(), publisher, manager, seed=1)

    def start_further(self, pool_name, processes, classes):
        if self.fails:
            raise ValueError("no resources for 1 bundles")
        self.started.append(pool_name)
        group = SimpleNamespace(
            world_size=1,
            call_timeout_seconds=60,
            seed_rank=lambda seed: None,
            init_model=lambda: None,
            execute_ranks=lambda ranks, method: [True],
        )
        group.with_deadline = lambda seconds: group
        return {str(Role.Rollout): group}

    def stop_further(self, pool_name):
        self.stopped.append(pool_name)

    def update(self):
        wait_for_start(self)
        return self.replicas.update()["rollout/num_engines"]


def test_the_newest_leave_first_and_their_places_are_used_again(tmp_path):
    run = Offered(tmp_path)
    run.replicas.want(3)
    assert [run.update(), run.update()] == [1, 3]
    run.replicas.want(2)
    assert run.update() == 2
    run.replicas.want(3)
    assert [run.update(), run.update()] == [2, 3]
    names = [f"joined_rollout_pool_{number}" for number in (0, 1)]
    assert run.started == [*names, names[1]]
    assert run.stopped == [names[1]]
    with pytest.raises(ValueError, match="the 1 that the run began with stay"):
        run.replicas.want(0)


def test_what_could_not_be_started_is_tried_again_when_the_number_is_written_again(
    tmp_path, caplog
):
    run = Offered(tmp_path, fails=True)
    path = tmp_path / FILE
    path.write_text("2")
    for _ in range(3):
        assert run.update() == 1
    failures = [r for r in caplog.records if "could not be started" in r.getMessage()]
    assert len(failures) == 1
    assert "no resources" in failures[0].getMessage()
    run.fails = False
    assert run.update() == 1
    os.utime(path, (1, 1))
    assert [run.update(), run.update()] == [1, 2]
    path.write_text("two")
    assert run.update() == 2
    assert "says 'two', which changes nothing" in caplog.text
