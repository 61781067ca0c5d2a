"""Asynchronous runs whose engines have devices of their own: one run, wherever the engines are.

Generation goes on while a step is trained, so what an engine holds is older than what is trained;
also an engine that is lost meanwhile gets what is published, and the run ends the same.
"""

import os
import signal

import pytest
import torch

from tests.toy import ROLLOUT, toy_run, weights
from tests.trainer.test_asynchronous import STEPS, Fails, Records, recorded, settings
from tests.trainer.test_engine_processes import engines_of_ranks, total
from tests.trainer.test_resume import same_weights
from verl.trainer.ppo.asynchronous import AsyncTrainer

APART = ("actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.nnodes=1", "trainer.controller=local")
PLACES = {
    "process": (f"{ROLLOUT}.name=native_process",),
    "rank": (*APART, f"{ROLLOUT}.n_gpus_per_node=1"),
    "ranks": (*APART, f"{ROLLOUT}.n_gpus_per_node=2"),
    "processes": (*APART, f"{ROLLOUT}.n_gpus_per_node=2", f"{ROLLOUT}.name=native_process"),
}
slow = pytest.mark.slow


def separate(folder, place="process", *, every=1, staleness=2, **options):
    """Training beside generation."""
    return [
        *settings(folder, **options),
        *PLACES[place],
        "async_training.reply_tokens=2",
        "algorithm.rollout_correction.bypass_mode=true",
        f"{ROLLOUT}.free_cache_engine=false",
        "trainer.use_v1=true",
        "trainer.v1.trainer_mode=separate_async",
        f"trainer.v1.separate_async.parameter_sync_step={every}",
        f"trainer.v1.separate_async.num_warmup_batches={staleness}",
        "trainer.save_freq=1",
    ]


class KeepsVersions(Records):
    """Also the weights of each version and the batches, to score them again."""

    def init_workers(self):
        super().init_workers()
        self.batches, self.weights_of = [], {0: weights(self)}

    def annotate(self, batch, step):
        self.batches.append(batch.select(deepcopy=True))
        return super().annotate(batch, step)

    def update(self, batch, step):
        batch = super().update(batch, step)
        self.weights_of[step.step] = weights(self)
        return batch


def stopped(seen, trainer):
    if trainer is not None:
        trainer.stop_workers()
    return seen, trainer


@pytest.fixture(scope="module")
def straight(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    return stopped(*recorded(KeepsVersions, toy, folder, *separate(folder)))


@pytest.fixture(scope="module")
def straight_by_two(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_two")
    return stopped(*recorded(Records, toy, folder, *separate(folder, every=2)))


def test_rows_go_on_across_updates_that_come_a_step_later(straight):
    spans, staleness = [], []
    for step, rows in straight[0]:
        for _, _, _, versions, _ in rows:
            flat = [v for segment in versions for v in segment or ()]
            spans.append(len(set(flat)))
            staleness.append(step - 1 - min(flat))
    assert max(spans) > 1
    assert (min(staleness), max(staleness)) == (0, 2)


@torch.no_grad()
def load(parameters, values):
    for name, weight in values.items():
        parameters[name].copy_(weight)


def test_each_token_has_the_log_prob_of_its_version_to_the_last_bit(straight):
    _, trainer = straight
    worker = trainer.actor_rollout_wg.workers[0]
    parameters = dict(worker.engine.module.named_parameters())
    seen, checked, last = set(), 0, weights(trainer)
    try:
        for batch in trainer.batches:
            versions, mask = batch.batch["policy_versions"], batch.batch["response_mask"].bool()
            for version in versions[mask].unique().tolist():
                load(parameters, trainer.weights_of[version])
                scored = worker.compute_log_prob(batch.select(deepcopy=True))
                found, sampled = scored.batch["old_log_probs"], batch.batch["rollout_log_probs"]
                chosen = mask & (versions == version)
                assert torch.equal(found[chosen], sampled[chosen].to(found.dtype))
                seen.add(version)
                checked += int(chosen.sum())
    finally:
        load(parameters, last)
    assert len(seen) > 3
    assert checked > 100


@pytest.mark.parametrize("place", [pytest.param(place, marks=slow) for place in PLACES])
def test_wherever_engines_are_it_is_the_same_run(toy, tmp_path, straight, place):
    seen, trainer = stopped(*recorded(Records, toy, tmp_path, *separate(tmp_path, place)))
    assert seen == straight[0]
    assert same_weights(trainer, straight[1])


@slow
@pytest.mark.parametrize("place", PLACES)
def test_two_steps_an_update_repeat_too(toy, tmp_path, straight_by_two, place):
    args = (toy, tmp_path, *separate(tmp_path, place, every=2))
    seen, trainer = stopped(*recorded(Records, *args))
    assert seen == straight_by_two[0]
    assert same_weights(trainer, straight_by_two[1])


@slow
def test_what_is_due_between_two_updates_is_done_with_the_weights_of_the_next(toy, tmp_path):
    often = ("trainer.save_freq=3", "trainer.test_freq=3")
    changes = [*separate(tmp_path, every=2), *often]
    steps, trainer = toy_run(toy, tmp_path, *changes, trainer_class=AsyncTrainer)
    trainer.stop_workers()
    validated = [step["step"] for step in steps if any(name.startswith("val-") for name in step)]
    assert [number for number in validated if number] == [4, 6]
    assert {path.name for path in tmp_path.rglob("global_step_*")} == {
        "global_step_4",
        "global_step_6",
    }


@slow
@pytest.mark.parametrize("fail_at", range(2, STEPS + 1))
@pytest.mark.parametrize("every", [1, 2])
def test_a_run_that_is_lost_continues_bit_for_bit(toy, tmp_path, request, every, fail_at):
    seen, whole = request.getfixturevalue("straight" if every == 1 else "straight_by_two")
    args = (toy, tmp_path, *separate(tmp_path, every=every))
    before, _ = recorded(Fails, *args, fail_at=fail_at)
    after, trainer = stopped(*recorded(Records, *args))
    committed = (fail_at - 1) // every * every
    assert before == seen[:fail_at]
    assert after == seen[committed:]
    assert same_weights(trainer, whole)


@slow
@pytest.mark.parametrize(("before", "after"), [("process", "processes"), ("ranks", "rank")])
def test_a_run_goes_on_with_more_engines_or_fewer(toy, tmp_path, straight, before, after):
    seen, whole = straight
    first, _ = recorded(Fails, toy, tmp_path, *separate(tmp_path, before), fail_at=4)
    then, trainer = stopped(*recorded(Records, toy, tmp_path, *separate(tmp_path, after)))
    assert first == seen[:4]
    assert then == seen[3:]
    assert same_weights(trainer, whole)


class LosesEngine(Records):
    """While a step is trained: requests are in flight, and what is trained is not published."""

    at: tuple

    def engine_pids(self):
        if self.rollout_wg is self.actor_rollout_wg:
            return [self.async_rollout_manager.rollout_replicas[0].pid]
        return engines_of_ranks(self.rollout_wg)[:1]

    def _make_visible(self, step):
        self.is_due = step.step + 1 in self.at
        return super()._make_visible(step)

    def _admit(self):
        if vars(self).pop("is_due", False):
            self.victims = self.engine_pids()
            for pid in self.victims:
                os.kill(pid, signal.SIGSTOP)  # so that it has requests when it is lost
        super()._admit()

    def update(self, batch, step):
        batch = super().update(batch, step)
        for pid in vars(self).pop("victims", ()):
            os.kill(pid, signal.SIGKILL)
        return batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "at"),
    [
        ("process", (4,)),
        pytest.param("process", (2, 4), marks=slow),
        pytest.param("processes", (2, 4), marks=slow),
    ],
)
def test_an_engine_lost_while_a_step_is_trained_gets_what_is_published(
    toy, tmp_path, straight, place, at
):
    kind = type("LosesEngine", (LosesEngine,), {"seen": [], "at": at})
    metrics, trainer = toy_run(toy, tmp_path, *separate(tmp_path, place), trainer_class=kind)
    trainer.stop_workers()
    assert total(metrics, "rollout/engine_restarts") == len(at)
    assert total(metrics, "rollout/redispatched") > 0
    assert kind.seen == straight[0]
    assert same_weights(trainer, straight[1])


MODES = {
    "one step off": ("async_training.mode=one_step_off",),
    "fully asynchronous": (
        "async_training.mode=fully_async",
        "async_training.trigger_parameter_sync_step=2",
        "async_training.staleness_threshold=0.5",
        "async_training.partial_rollout=true",
        "data.gen_batch_size=1",
    ),
}


@slow
@pytest.mark.parametrize("mode", MODES)
def test_the_other_modes_repeat_wherever_engines_are(toy, tmp_path, mode):
    runs = []
    for place in ("process", "rank"):
        folder = tmp_path / place
        folder.mkdir()
        common = [c for c in separate(folder, place) if "trainer.v1" not in c and "use_v1" not in c]
        runs.append(stopped(*recorded(Records, toy, folder, *common, *MODES[mode])))
    assert runs[0][0] == runs[1][0]
    assert same_weights(runs[0][1], runs[1][1])
