"""A rollout engine in a process of its own is killed idle, serving and amid a weight update."""

import os
import signal
from collections import Counter

import pytest
import torch

from tests.chaos.strikes import is_running, wait_until_gone
from tests.toy import toy_run, weights
from tests.trainer.test_engine_processes import (
    APART,
    make_unlucky,
    total,
    without_engine_metrics,
)
from tests.trainer.test_ranks import KeepsResponses, comparable

STEPS = ("trainer.total_training_steps=5",)
SERVING, IDLE, UPDATING = 2, 3, 4


class Ledger(KeepsResponses):
    """What each step was trained on, and which weights sampled it."""

    def update(self, batch, step):
        self.trained = [*getattr(self, "trained", []), self.entry(batch, step)]
        return super().update(batch, step)

    def entry(self, batch, step):
        trajectories = [t for group in step.groups for t in group.trajectories]
        versions = {v for t in trajectories for s in t.segments for v in s.versions or ()}
        return step.step, Counter(batch.non_tensor_batch["uid"].tolist()), versions


class LosesEngines(Ledger):
    """One way to be lost in each of three steps."""

    def rollout(self, step):
        if step.step == SERVING:
            self.unlucky = make_unlucky(self)
        elif step.step == IDLE:
            self.kill_engine()
        return super().rollout(step)

    def update(self, batch, step):
        if step.step == UPDATING:
            engine = self.actor_rollout_wg.workers[0].engine
            original = engine.get_per_tensor_param

            def deadly():
                for number, named in enumerate(original()):
                    if number == 1:
                        self.kill_engine()
                        engine.get_per_tensor_param = original
                    yield named

            engine.get_per_tensor_param = deadly
        elif step.step > UPDATING:
            self.last = self.unlucky.process.pid
            assert is_running(self.last)
        return super().update(batch, step)

    def kill_engine(self):
        pid = self.unlucky.process.pid
        self.killed = [*getattr(self, "killed", []), pid]
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_engine_may_be_lost_idle_serving_and_amid_an_update(own_toy, tmp_path):
    expected, straight = toy_run(own_toy, tmp_path / "a", *STEPS, APART, trainer_class=Ledger)
    straight.stop_workers()
    found, trainer = toy_run(own_toy, tmp_path / "b", *STEPS, APART, trainer_class=LosesEngines)
    trainer.stop_workers()
    assert total(found, "rollout/engine_restarts") == 3
    assert total(found, "rollout/redispatched") >= 16, "all requests that were in flight"
    for step, uids, versions in trainer.trained:
        assert sorted(uids) == sorted(f"{step}-{row}" for row in range(4)), "none lost or doubled"
        assert set(uids.values()) == {4}
        assert versions == {step - 1}, "no token from other weights than the step's own"
    assert trainer.seen == straight.seen
    assert without_engine_metrics(comparable(found)) == without_engine_metrics(comparable(expected))
    pairs = zip(weights(trainer).values(), weights(straight).values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert wait_until_gone([*trainer.killed, trainer.last]) == []
