"""What code written for this interface relies on: configuration classes and files."""

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import verl.trainer
from verl.base_config import BaseConfig
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import (
    ActorConfig,
    FSDPActorConfig,
    FSDPOptimizerConfig,
    McoreEngineConfig,
)

CONFIG = Path(verl.trainer.__file__).parent / "config"


def test_a_new_name_can_be_attached_once():
    config = BaseConfig()
    config.note = "x"
    assert (config["note"], config.get("note")) == ("x", "x")
    with pytest.raises(FrozenInstanceError):
        config.note = "y"


def test_a_missing_key_is_an_attribute_error_and_a_number_a_type_error():
    config = BaseConfig()
    with pytest.raises(AttributeError):
        config["missing"]
    assert config.get("missing", 3) == 3
    with pytest.raises(TypeError):
        config[123]


def actor(**options):
    return ActorConfig(strategy="fsdp", rollout_n=1, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ppo_micro_batch_size": 4, "ppo_micro_batch_size_per_gpu": 2}, "You have set both"),
        (
            {"ppo_micro_batch_size": None, "ppo_micro_batch_size_per_gpu": None},
            "Please set at least one",
        ),
    ],
)
def test_an_actor_needs_one_micro_batch_size(options, text):
    with pytest.raises(ValueError, match=text):
        actor(use_dynamic_bsz=False, **options)


def test_a_wrong_aggregation_is_named():
    with pytest.raises(ValueError, match="Invalid loss_agg_mode"):
        actor(use_dynamic_bsz=True, loss_agg_mode="token-median")


def test_one_micro_batch_size_or_dynamic_batches_are_enough():
    assert actor(use_dynamic_bsz=False, ppo_micro_batch_size=2).ppo_micro_batch_size == 2
    actor(use_dynamic_bsz=False, ppo_micro_batch_size_per_gpu=2)
    actor(use_dynamic_bsz=True, ppo_micro_batch_size=None, ppo_micro_batch_size_per_gpu=None)


@pytest.mark.parametrize(
    ("options", "num_gpus", "train_batch_size", "text"),
    [
        ({"ppo_mini_batch_size": 256}, 8, 128, "train_batch_size"),
        ({"ppo_mini_batch_size": 256, "ppo_micro_batch_size": 8}, 16, 512, "must be >= n_gpus"),
        ({"ppo_mini_batch_size": 250, "ppo_micro_batch_size": 8}, 8, 512, "ppo_mini_batch_size"),
    ],
)
def test_an_actor_checks_its_sizes_against_a_machine(options, num_gpus, train_batch_size, text):
    config = actor(use_dynamic_bsz=False, **options)
    with pytest.raises(ValueError, match=text):
        config.validate(num_gpus, train_batch_size)


def test_sizes_that_fit_pass():
    sizes = {"ppo_mini_batch_size": 256, "ppo_micro_batch_size": 16}
    actor(use_dynamic_bsz=False, **sizes).validate(16, 512)


def test_sequence_parallel_needs_packed_sequences():
    config = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=2,
        ulysses_sequence_parallel_size=2,
    )
    config.validate(8, 512, {"use_remove_padding": True})
    with pytest.raises(ValueError, match="you must enable `use_remove_padding`"):
        config.validate(8, 512, {"use_remove_padding": False})


def test_the_lowest_learning_rate_may_be_none():
    assert FSDPOptimizerConfig(lr=1e-6).min_lr_ratio is None
    assert FSDPOptimizerConfig(lr=1e-6, min_lr_ratio=None).min_lr_ratio is None


def test_a_file_may_have_no_lowest_learning_rate():
    optim = {"min_lr_ratio": None}
    loaded = load_config({"actor_rollout_ref": {"actor": {"optim": optim}}}, PPOConfig)
    assert loaded.faults == []
    assert loaded.config.actor_rollout_ref.actor.optim.min_lr_ratio is None


def test_the_older_name_of_the_schedule_works_on_the_class():
    assert FSDPOptimizerConfig(lr=1e-6, warmup_style="cosine").lr_scheduler_type == "cosine"
    target = "verl.workers.config.FSDPOptimizerConfig"
    found = omega_conf_to_dataclass(
        OmegaConf.create({"_target_": target, "lr": 1e-6, "warmup_style": "cosine"})
    )
    assert found.lr_scheduler_type == "cosine"


def test_sequence_parallel_needs_two_tensor_parallel_ranks():
    assert McoreEngineConfig(tensor_model_parallel_size=1).sequence_parallel is False
    assert (
        McoreEngineConfig(tensor_model_parallel_size=1, sequence_parallel=True).sequence_parallel
        is False
    )
    config = McoreEngineConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    assert config.sequence_parallel is True
    config.sequence_parallel = False


@pytest.mark.parametrize(
    ("group", "name", "overrides", "cls"),
    [
        ("actor", "dp_actor", ["strategy=fsdp2"], "FSDPActorConfig"),
        ("actor", "megatron_actor", [], "McoreActorConfig"),
        ("ref", "dp_ref", ["strategy=fsdp"], None),
        ("ref", "megatron_ref", [], None),
        ("rollout", "rollout", [], "RolloutConfig"),
    ],
)
def test_a_group_file_composes_alone(group, name, overrides, cls):
    per_gpu = {"actor": "ppo_micro_batch_size_per_gpu=8", "ref": None, "rollout": None}[group]
    with initialize_config_dir(str(CONFIG / group), version_base=None):
        config = compose(name, overrides=[*overrides, *([per_gpu] if per_gpu else [])])
    for item in overrides:
        key, _, value = item.partition("=")
        assert config[key] == value
    built = omega_conf_to_dataclass(config)
    assert type(built).__name__ == config["_target_"].rpartition(".")[2]
    assert cls is None or type(built).__name__ == cls


@pytest.mark.parametrize("name", ["actor/actor", "critic/critic", "ref/ref", "profiler/profiler"])
def test_the_base_files_exist(name):
    with initialize_config_dir(str(CONFIG), version_base=None):
        config = compose(name)
    assert config
    if name == "actor/actor":
        assert config.actor["_target_"] == "verl.workers.config.ActorConfig"
