"""Devices of the trainer generate while it waits, and the run is the same."""

import asyncio
import os
import signal
import threading

import pytest

from tests.toy import toy_run
from tests.trainer.test_async_placing import MODES, separate, stopped, straight  # noqa: F401
from tests.trainer.test_asynchronous import Records, recorded
from tests.trainer.test_engine_processes import total
from tests.trainer.test_resume import same_weights
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.trainer.ppo.lending import LendingRule, Threshold, lending_rule

pytestmark = pytest.mark.timeout(300)  # processes that start on busy cores take their time
SWITCH = "trainer.v1.separate_async.hybrid_rollout"
ALWAYS = (f"{SWITCH}.enable_switch=true", f"{SWITCH}.switch_threshold_ratio=1.0")


class Watches(Records):
    """How many requests lent engines got, each time that they were given back.

    No turn begins before engines are lent, and they are lent each time that the trainer waits,
    however fast it is.
    """

    num_lent: list

    def init_workers(self):
        super().init_workers()
        lending, servers = self.lending, self.async_rollout_manager.rollouter.servers
        give_back, lend, wait, ask = (
            lending._give_back,
            lending._lend,
            lending.while_waiting,
            servers._ask,
        )
        has_lent = threading.Event()

        def counted():
            self.num_lent.append(sum(slot.num_requests for slot in servers.fleet.slots[1:]))
            give_back()

        def lent():
            is_lent = lend()
            has_lent.set()
            return is_lent

        async def asked(*given, **options):
            if not has_lent.is_set():
                await asyncio.to_thread(has_lent.wait, 120.0)
            return await ask(*given, **options)

        lending._give_back, lending._lend, servers._ask = counted, lent, asked
        lending.while_waiting = lambda share, report: wait(max(share, 0.5), report)


def lent_run(toy, folder, *changes, cls=Watches):
    kind = type(cls.__name__, (cls,), {"seen": [], "num_lent": []})
    metrics, trainer = toy_run(toy, folder, *changes, trainer_class=kind)
    trainer.stop_workers()
    return kind, metrics, trainer


def test_lent_devices_generate_while_the_trainer_waits_and_the_run_is_the_same(
    toy,
    tmp_path,
    straight,  # noqa: F811
):
    kind, metrics, trainer = lent_run(toy, tmp_path, *separate(tmp_path, "rank"), *ALWAYS)
    assert total(metrics, "separate_async/switch/count") == len(kind.num_lent) > 1
    assert total(metrics, "timing_s/switch_to_rollout") > 0
    assert max(kind.num_lent) > 0
    assert kind.seen == straight[0]
    assert same_weights(trainer, straight[1])


class LosesLent(Watches):
    """The processes on the trainer's devices end in a step."""

    def update(self, batch, step):
        batch = super().update(batch, step)
        if step.step == 3:
            (worker,) = self.lending._group.workers
            os.kill(worker.pid, signal.SIGKILL)
        return batch


@pytest.mark.slow
def test_without_its_processes_nothing_is_lent_and_the_run_goes_on(
    toy,
    tmp_path,
    straight,  # noqa: F811
):
    changes = (*separate(tmp_path, "processes"), *ALWAYS)
    kind, metrics, trainer = lent_run(toy, tmp_path, *changes, cls=LosesLent)
    assert total(metrics[:3], "separate_async/switch/count") > 0
    assert total(metrics[4:], "separate_async/switch/count") == 0
    assert kind.seen == straight[0]
    assert same_weights(trainer, straight[1])


@pytest.mark.slow
@pytest.mark.parametrize("rebalances", [True, False])
def test_a_fully_asynchronous_run_lends_too(toy, tmp_path, rebalances):
    def changes(folder):
        common = separate(folder, "rank")
        return [c for c in common if "trainer.v1" not in c and "use_v1" not in c]

    plain, mode = tmp_path / "plain", MODES["fully asynchronous"]
    seen, whole = stopped(*recorded(Records, toy, plain, *changes(plain), *mode))
    lends = (
        "async_training.use_dynamic_resource_scheduling=true",
        "async_training.dynamic_schedule_deactivate_ratio=1.0",
        f"async_training.dynamic_schedule_enable_rebalance={rebalances}",
    )
    folder = tmp_path / "lent"
    kind, metrics, trainer = lent_run(toy, folder, *changes(folder), *mode, *lends)
    assert total(metrics, "separate_async/switch/count") > 0
    assert kind.seen == seen
    assert same_weights(trainer, whole)


def test_the_threshold_rises_where_lending_pays_and_falls_where_it_does_not():
    rule = LendingRule(
        ratio=0.4, is_adaptive=True, step_up=0.05, step_down=0.03, release_steps=2, window=2
    )
    threshold = Threshold(rule)
    threshold.learn(wait_seconds=3.0, switch_seconds=2.0)
    assert threshold.value == pytest.approx(0.45)
    threshold.learn(wait_seconds=2.5, switch_seconds=4.0)  # switching took 3 s on average
    assert threshold.value == pytest.approx(0.45)
    threshold.learn(wait_seconds=2.5, switch_seconds=1.0)  # 2.5 s: not longer
    assert threshold.value == pytest.approx(0.42)
    threshold.learn(wait_seconds=2.5, switch_seconds=1.0)
    assert threshold.value == pytest.approx(0.47)
    for _ in range(100):
        threshold.learn(wait_seconds=0.0, switch_seconds=1.0)
    assert threshold.value == pytest.approx(0.03)
    fixed = Threshold(LendingRule(ratio=0.3))
    fixed.learn(wait_seconds=0.0, switch_seconds=1.0)
    assert fixed.value == 0.3


def test_the_keys_of_both_generations_say_when_to_lend():
    correction = {"rollout_correction": {"bypass_mode": True}}
    section = {"hybrid_engine": False, "rollout": {"nnodes": 1, "free_cache_engine": False}}
    switch = {"enable_switch": True, "switch_threshold_ratio": 0.2}
    v1 = {"trainer_mode": "separate_async", "separate_async": {"hybrid_rollout": switch}}
    common = {"algorithm": correction, "actor_rollout_ref": section}
    config = load_config({**common, "trainer": {"v1": v1}}, PPOConfig).config
    assert lending_rule(config) == LendingRule(
        ratio=0.2, is_adaptive=True, step_up=0.05, step_down=0.03, release_steps=2, window=3
    )
    training = {"mode": "fully_async", "use_dynamic_resource_scheduling": True}
    config = load_config({**common, "async_training": training}, PPOConfig).config
    assert lending_rule(config) == LendingRule(ratio=0.3)
    assert lending_rule(load_config(common, PPOConfig).config) is None
