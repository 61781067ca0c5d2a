"""Asynchronous runs: an engine, a rank that generates and one that trains are lost in each phase.

Generation goes on beside training, so a loss may meet rows of later steps anywhere: while they are
sampled, while they are settled for an update, while one is made, and while it is published.
"""

import os
import signal

import pytest

from tests.toy import ACTOR, KeepsTrainer, make_toy, toy_run
from tests.trainer.test_async_placing import separate
from tests.trainer.test_asynchronous import STEPS, Records, recorded
from tests.trainer.test_engine_processes import engines_of_ranks

PHASES = {2: "generating", 3: "settling", 4: "training", 5: "publishing"}
TWO_TRAIN = ("trainer.n_gpus_per_node=2", f"{ACTOR}.fsdp_config.sharding=zero1")
PLACES = {"engine": "processes", "rollout rank": "ranks", "trainer rank": "rank"}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


class Struck(Records):
    """Loses `victim` once in each phase, by the signal `number`."""

    victim, number = "", 0
    struck: set

    def strike(self, phase):
        if PHASES.get(self.global_steps) != phase or phase in self.struck:
            return
        self.struck.add(phase)
        if self.victim == "engine":
            pid = engines_of_ranks(self.rollout_wg)[0]
        elif self.victim == "rollout rank":
            pid = self.rollout_wg.workers[-1].pid
        else:
            pid = self.actor_rollout_wg.workers[-1].pid
        os.kill(pid, self.number)

    def rollout(self, step):
        self.strike("generating")
        return super().rollout(step)

    def update(self, batch, step):
        self.strike("training")
        return super().update(batch, step)

    def _settle(self):
        self.strike("settling")
        super()._settle()

    def _make_visible(self, step):
        publish = self.publisher.publish

        def struck_publish():
            self.strike("publishing")
            return publish()

        self.publisher.publish = struck_publish
        try:
            return super()._make_visible(step)
        finally:
            del self.publisher.publish


def checkpoint(folder):
    """The last weights, in bytes."""
    files = (folder / "checkpoints" / f"global_step_{STEPS}" / "actor").rglob("*.safetensors")
    found = {path.name: path.read_bytes() for path in files}
    assert found
    return found


def changes_of(folder, victim):
    ranks = TWO_TRAIN if victim == "trainer rank" else ()
    return [*separate(folder, PLACES[victim]), *ranks, f"trainer.max_restarts={len(PHASES)}"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", PLACES)
def test_whoever_is_lost_in_whichever_phase_the_run_ends_the_same(toy, tmp_path, victim, number):
    folders = [tmp_path / name for name in ("straight", "struck")]
    for folder in folders:
        folder.mkdir()
    seen, whole = recorded(Records, toy, folders[0], *changes_of(folders[0], victim))
    whole.stop_workers()
    fields = {"seen": [], "struck": set(), "victim": victim, "number": number}
    kind = type("Struck", (Struck,), fields)
    _, trainer = toy_run(
        toy,
        folders[1],
        *changes_of(folders[1], victim),
        trainer_class=kind,
        runner_class=KeepsTrainer,
    )
    trainer.stop_workers()
    assert kind.struck == set(PHASES.values())
    by_step = dict(seen)
    assert all(rows == by_step[step] for step, rows in kind.seen), "also those trained again"
    assert {step for step, _ in kind.seen} == by_step.keys()
    assert checkpoint(folders[1]) == checkpoint(folders[0])
