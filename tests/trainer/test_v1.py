"""Trainers of newer recipes: hooks have their moments, a registered class runs its mode."""

import pytest

from tests.registries import restored
from tests.toy import ROLLOUT, toy_run
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.trainer.ppo.asynchronous import AsyncTrainer
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.ppo.v1 import (
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    get_trainer_cls,
    register_trainer,
    trainers,
)
from verl.trainer.task_runner import TaskRunner

ASYNC = (
    "trainer.v1.trainer_mode=colocate_async",
    "algorithm.rollout_correction.bypass_mode=True",
)
MOMENTS = ("init", "train", "validate", "step", "sample")


def recording(base):
    """A trainer that notes its hooks, with the step."""

    def note(name):
        return lambda self: self.moments.append((name, self.global_steps))

    names = [f"on_{one}_{end}" for one in MOMENTS for end in ("begin", "end")]
    hooks = {name: note(name[3:]) for name in names if hasattr(base, name)}
    return type("Recording", (base,), {"moments": [], **hooks})


@pytest.mark.parametrize(
    ("base", "options"), [(PPOTrainerSync, ()), (PPOTrainerColocateAsync, ASYNC)]
)
def test_hooks_are_called_at_their_moments(base, options, toy, tmp_path):
    cls = recording(base)
    steps = ("trainer.total_training_steps=2", "trainer.test_freq=2", f"{ROLLOUT}.n=2")
    toy_run(toy, tmp_path, *steps, *options, trainer_class=cls)
    step = ["step_begin", "sample_begin", "sample_end", "step_end"]
    assert [name for name, _ in cls.moments if not name.startswith("validate")] == [
        "init_end",
        "train_begin",
        *step,
        *step,
        "train_end",
    ]
    validated = [moment for moment in cls.moments if moment[0] == "validate_end"]
    assert validated[-1] == ("validate_end", 2)
    assert [number for name, number in cls.moments if name == "sample_end"] == [1, 2]


@pytest.fixture
def registry():
    """What a test registers is gone afterwards."""
    with restored(trainers.trainers):
        yield


def chosen(**values):
    return TaskRunner().trainer_for(load_config(values, PPOConfig).config)


def test_a_registered_trainer_runs_its_mode(registry):
    assert get_trainer_cls("separate_async") is PPOTrainerSeparateAsync
    colocated = {"trainer": {"v1": {"trainer_mode": "colocate_async"}}}
    assert (chosen(), chosen(**colocated)) == (PPOTrainer, AsyncTrainer)
    mine = register_trainer("colocate_async")(recording(PPOTrainerColocateAsync))
    assert (chosen(), chosen(**colocated)) == (PPOTrainer, mine)
    assert get_trainer_cls("colocate_async") is mine


def test_a_synchronous_trainer_is_no_trainer_of_an_asynchronous_mode(registry):
    with pytest.raises(ValueError, match=r"is no AsyncTrainer; derive it from"):
        register_trainer("separate_async")(recording(PPOTrainerSync))
    with pytest.raises(ValueError, match="unknown trainer mode"):
        register_trainer("separate")(PPOTrainerSync)
