"""`transfer_queue.enable`: the batch lies in a data plane, and the run is the same run."""

from importlib.util import find_spec

import pytest
import torch

from tests.toy import ACTOR, toy_run
from tests.trainer.test_asynchronous import STEPS, colocated
from tests.trainer.test_ranks import EVERYTHING, assert_same_run
from tests.trainer.test_resume import same_weights
from verl.data_plane import connect
from verl.data_plane.batch import StoredBatch
from verl.trainer.ppo.asynchronous import AsyncTrainer
from verl.trainer.ppo.trainer import PPOTrainer

STORED = "transfer_queue.enable=true"
PLAIN = ("algorithm.adv_estimator=grpo", f"{ACTOR}.use_kl_loss=true")
SAMPLED = (f"{ACTOR}.use_rollout_log_probs=true", "algorithm.rollout_correction.rollout_is=token")


class KeepsEntries(PPOTrainer):
    """What the plane still holds when a run ends."""

    def finish_run(self):
        super().finish_run()
        self.left = self.plane.entries() if hasattr(self, "plane") else {}


class Watched(KeepsEntries):
    """Keeps what the driver holds when a step ends."""

    def finish_step(self, batch, step):
        self.seen = [*getattr(self, "seen", []), batch]
        super().finish_step(batch, step)


@pytest.mark.parametrize(
    "changes",
    [EVERYTHING, pytest.param(PLAIN, marks=pytest.mark.slow), SAMPLED],
    ids=["gae", "grpo", "sampled"],
)
def test_weights_are_bit_equal_after_five_steps(toy, tmp_path, changes):
    five = (*changes, "trainer.total_training_steps=5", f"trainer.rollout_data_dir={tmp_path}/rows")
    expected, plain = toy_run(toy, tmp_path / "plain", *five)
    found, trainer = toy_run(toy, tmp_path / "stored", *five, STORED, trainer_class=Watched)
    assert_same_run(found, expected)
    for name, weight in weights_of(plain).items():
        assert torch.equal(weights_of(trainer)[name], weight), name
    trainer.stop_workers()


@pytest.mark.parametrize(
    "correction",
    [
        pytest.param("bypass_mode=true", marks=pytest.mark.slow),
        "bypass_mode=false algorithm.rollout_correction.rollout_is=token",
    ],
)
def test_an_asynchronous_run_is_the_same_run_too(toy, tmp_path, correction):
    chosen = f"algorithm.rollout_correction.{correction}".split()
    runs, kind = [], type("Kept", (KeepsEntries, AsyncTrainer), {})
    for folder, changes in ((tmp_path / "plain", ()), (tmp_path / "stored", (STORED,))):
        settings = [*colocated(2, folder), *chosen, *changes]
        runs.append(toy_run(toy, folder, *settings, trainer_class=kind))
    (expected, plain), (found, trainer) = (
        ([without_waiting(step) for step in metrics], trainer) for metrics, trainer in runs
    )
    assert_same_run(found, expected)
    assert any("training/off_policy/age_2/token_ratio" in step for step in found)
    assert same_weights(trainer, plain)
    assert trainer.left == {}
    trainer.stop_workers()


class LosesPlane(AsyncTrainer):
    """Finds its plane gone in each phase, once."""

    phases = {2: "generating", 3: "settling", 4: "training", 5: "publishing"}
    struck: set

    def strike(self, phase):
        if self.phases.get(self.global_steps) == phase and phase not in self.struck:
            self.struck.add(phase)
            self.plane.close()

    def init_workers(self):
        super().init_workers()
        update = self.actor_rollout_wg.update_actor

        def struck_update(batch):
            self.strike("training")
            return update(batch)

        self.actor_rollout_wg.update_actor = struck_update

    def rollout(self, step):
        self.strike("generating")
        return super().rollout(step)

    def _settle(self):
        self.strike("settling")
        super()._settle()

    def _make_visible(self, step):
        self.strike("publishing")
        return super()._make_visible(step)


@pytest.mark.slow
def test_a_plane_lost_in_any_phase_costs_the_steps_since_the_last_commit(toy, tmp_path):
    folders = [tmp_path / "straight", tmp_path / "struck"]
    changes = [
        [*colocated(2, folder), STORED, "trainer.save_freq=1", "trainer.max_restarts=4"]
        for folder in folders
    ]
    _, straight = toy_run(toy, folders[0], *changes[0], trainer_class=AsyncTrainer)
    straight.stop_workers()
    kind = type("LosesPlane", (LosesPlane,), {"struck": set()})
    metrics, trainer = toy_run(toy, folders[1], *changes[1], trainer_class=kind)
    trainer.stop_workers()
    assert kind.struck == set(LosesPlane.phases.values())
    assert [step["step"] for step in metrics][-1] == STEPS
    assert same_weights(trainer, straight)


def without_waiting(metrics):
    waits = ("fully_async/", "trainer/idle", "rollouter/")
    return {name: value for name, value in metrics.items() if not name.startswith(waits)}


def weights_of(trainer):
    (worker,) = trainer.actor_rollout_wg.workers
    return worker.engine.module.state_dict()


def test_the_driver_holds_lengths_and_labels_and_the_plane_is_empty_after_a_step(toy, tmp_path):
    _, trainer = toy_run(toy, tmp_path, *PLAIN, STORED, trainer_class=Watched)
    assert trainer.left == {}
    for batch in trainer.seen:
        assert isinstance(batch, StoredBatch)
        assert all(column.dim() == 1 for column in batch.batch.values())  # a number per row
        assert {"advantages", "old_log_probs", "responses"} <= set(batch.fields)
    address = trainer.plane.address()
    trainer.stop_workers()
    with pytest.raises(RuntimeError, match=trainer.plane.name):
        connect(address)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("trainer.n_gpus_per_node=2", "share no store; use trainer.controller=ray"),
        ("algorithm.use_pf_ppo=true", "draws the rows of a batch anew"),
    ],
)
def test_what_it_cannot_do_is_refused(toy, tmp_path, change, reason):
    changes = ("algorithm.adv_estimator=gae", "trainer.controller=local", change, STORED)
    with pytest.raises(ValueError, match=reason):
        toy_run(toy, tmp_path, *changes)


class OwnCredit(PPOTrainer):
    def assign_credit(self, batch, step):
        return super().assign_credit(batch, step)


def test_a_stage_of_ones_own_is_named(toy, tmp_path):
    with pytest.raises(ValueError, match="OwnCredit has an own assign_credit"):
        toy_run(toy, tmp_path, STORED, trainer_class=OwnCredit)


@pytest.mark.slow  # actors import everything
@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("has_package", [False, True])
def test_two_actors_on_ray_train_as_one_process_does(toy, tmp_path, has_package):
    from tests.trainer.test_ray_run import ray_run

    if has_package != (find_spec("transfer_queue") is not None):
        pytest.skip("the package TransferQueue is used where it is installed")
    units = "transfer_queue.backend.SimpleStorage.num_data_storage_units=1"
    changes = (STORED, units) if has_package else (STORED,)
    found = ray_run(toy, tmp_path / "ray", *EVERYTHING, *changes)
    expected, _ = toy_run(toy, tmp_path / "here", *EVERYTHING)
    assert_same_run(found, expected)
