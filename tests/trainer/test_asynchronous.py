"""Asynchronous runs: functions of their seed and plan, whichever way they are interrupted."""

import pytest
import yaml

from tests.toy import ROLLOUT, toy_run
from tests.trainer.test_resume import same_weights
from verl.trainer.ppo.asynchronous import AsyncTrainer
from verl.workers.rollout.kept_cache import KeptCacheError

STEPS = 6
TURNS = 3


def settings(folder, *, turns=TURNS, **options):
    """Of a task whose responses have very different lengths, with replies of a tool."""
    folder.mkdir(exist_ok=True)
    entry = {"name": "uneven", "_target_": "tests.uneven_loop.UnevenLoop", "num_turns": turns}
    (folder / "loops.yaml").write_text(yaml.safe_dump([{**entry, **options}]))
    return [
        f"trainer.total_training_steps={STEPS}",
        f"{ROLLOUT}.exact=true",
        f"{ROLLOUT}.calculate_log_probs=true",
        f"{ROLLOUT}.agent.agent_loop_config_path={folder / 'loops.yaml'}",
        f"{ROLLOUT}.agent.default_agent_loop=uneven",
        "data.max_response_length=32",
        f"{ROLLOUT}.n=2",
    ]


def colocated(staleness, folder, **options):
    return [
        *settings(folder, **options),
        "async_training.reply_tokens=2",
        f"algorithm.rollout_correction.bypass_mode={staleness > 0}",
        "trainer.use_v1=true",
        "trainer.v1.trainer_mode=colocate_async",
        f"trainer.v1.colocate_async.num_warmup_batches={staleness}",
    ]


class Records(AsyncTrainer):
    """Keeps what every step trained on."""

    seen: list

    def annotate(self, batch, step):
        rows = [
            (t.uid, t.sample, t.response_ids, [s.versions for s in t.response], t.grade.value)
            for group in step.groups
            for t in group.trajectories
        ]
        type(self).seen.append((step.step, rows))
        return super().annotate(batch, step)


class Fails(Records):
    """Is lost in the middle of a step."""

    fail_at = 0

    def assign_credit(self, batch, step):
        if step.step == self.fail_at:
            raise RuntimeError("lost")
        return super().assign_credit(batch, step)


def recorded(cls, *args, **fields):
    """What each step trained on, and the trainer, unless it is lost."""
    kind = type(cls.__name__, (cls,), {"seen": [], **fields})
    if cls is not Fails:
        return kind.seen, toy_run(*args, trainer_class=kind)[1]
    with pytest.raises(RuntimeError, match="lost"):
        toy_run(*args, trainer_class=kind)
    return kind.seen, None


@pytest.fixture(scope="module")
def straight(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    return recorded(Records, toy, folder, *colocated(2, folder), "trainer.save_freq=1")


@pytest.mark.parametrize(
    ("turns", "steps"), [(TURNS, STEPS), pytest.param(1, 20, marks=pytest.mark.slow)]
)
def test_without_staleness_it_is_the_synchronous_run(toy, tmp_path, turns, steps):
    length = (f"trainer.total_training_steps={steps}", "trainer.total_epochs=10")
    plain = toy_run(toy, tmp_path, *settings(tmp_path, turns=turns), *length)
    ahead = (*colocated(0, tmp_path, turns=turns), *length)
    same = toy_run(toy, tmp_path, *ahead, trainer_class=AsyncTrainer)
    assert [len(metrics) for metrics, _ in (plain, same)] == [steps, steps]
    assert same_weights(plain[1], same[1])


def test_two_runs_are_the_same_run_and_rows_go_on_across_updates(toy, tmp_path, straight):
    seen, trainer = recorded(Records, toy, tmp_path, *colocated(2, tmp_path))
    assert seen == straight[0]
    assert same_weights(trainer, straight[1])
    spans, staleness = [], []
    for step, rows in seen:
        for _, _, _, versions, _ in rows:
            flat = [v for segment in versions for v in segment or ()]
            spans.append(len(set(flat)))
            staleness.append(step - 1 - min(flat))
    assert max(spans) > 1
    assert (min(staleness), max(staleness)) == (0, 2)


@pytest.mark.parametrize(
    "fail_at",
    [pytest.param(at, marks=[] if at == 4 else pytest.mark.slow) for at in range(2, STEPS + 1)],
)
def test_a_run_that_is_lost_continues_bit_for_bit(toy, tmp_path, fail_at, straight):
    args = (toy, tmp_path, *colocated(2, tmp_path), "trainer.save_freq=1")
    before, _ = recorded(Fails, *args, fail_at=fail_at)
    after, trainer = recorded(Records, *args)
    seen, whole = straight
    assert before == seen[:fail_at]
    assert after == seen[fail_at - 1 :]
    assert same_weights(trainer, whole)


@pytest.mark.slow
def test_replies_that_a_lost_run_got_are_not_asked_for_again(toy, tmp_path):
    args = (toy, tmp_path, *colocated(2, tmp_path, is_random=True), "trainer.save_freq=1")
    before, _ = recorded(Fails, *args, fail_at=4)
    after, _ = recorded(Records, *args)
    assert after[0] == before[-1]


def test_kept_keys_and_values_are_measured_in_every_step_and_bounded(toy, tmp_path):
    keeping = ("exact=false", "free_cache_engine=false", "kv_after_update=keep")
    options = [*colocated(2, tmp_path), *(f"{ROLLOUT}.{option}" for option in keeping)]
    with pytest.raises(KeptCacheError, match="kv_max_kl allows 1e-11"):
        toy_run(toy, tmp_path, *options, f"{ROLLOUT}.kv_max_kl=1e-11", trainer_class=AsyncTrainer)
