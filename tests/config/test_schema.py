"""The schema has every public key with its default, and every option says what it does."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl.config import ROOTS, BaseConfig
from verl.config.actor import ActorConfig, FSDPActorConfig, McoreActorConfig
from verl.config.base import is_option
from verl.config.engine import FSDPEngineConfig, TrainingWorkerConfig, VeOmniEngineConfig
from verl.config.optimizer import OptimizerConfig, VeOmniOptimizerConfig
from verl.config.ppo import PPOConfig, PPOMegatronConfig
from verl.config.profiler import ProfileConfig, ProfilerConfig
from verl.config.schema import default_tree
from verl.config.yaml_files import sentences, summary

SURFACE = json.loads((Path(__file__).parent / "surface_keys.json").read_text())

WORKER_NAMES = """
ActorConfig FSDPActorConfig McoreActorConfig PolicyLossConfig RouterReplayConfig CriticConfig
FSDPCriticConfig McoreCriticConfig FSDPCriticModelCfg EngineConfig FSDPEngineConfig
McoreEngineConfig VeOmniEngineConfig TrainingWorkerConfig HFModelConfig MtpConfig
OptimizerConfig FSDPOptimizerConfig McoreOptimizerConfig VeOmniOptimizerConfig RewardModelConfig
SandboxFusionConfig RolloutConfig SamplingConfig MultiTurnConfig AgentLoopConfig
CustomAsyncServerConfig TraceConfig ServerConfig PrometheusConfig CheckpointEngineConfig
"""
PUBLIC_NAMES = {
    "verl.base_config": ["BaseConfig"],
    "verl.trainer.config": [
        *("AlgoConfig", "KLControlConfig", "FilterGroupsConfig", "RolloutCorrectionConfig"),
        *("CheckpointConfig", "ProfileConfig", "BaseModelConfig"),
    ],
    "verl.trainer.config.algorithm": ["RolloutCorrectionConfig", "AlgoConfig"],
    "verl.trainer.config.config": ["ModuleConfig", "RewardManagerConfig"],
    "verl.workers.config": WORKER_NAMES.split(),
    "verl.workers.config.actor": ["ActorConfig"],
    "verl.workers.config.critic": ["CriticConfig"],
    "verl.workers.config.engine": ["FSDPEngineConfig", "McoreEngineConfig"],
    "verl.workers.config.model": ["HFModelConfig"],
    "verl.workers.config.optimizer": ["FSDPOptimizerConfig"],
    "verl.workers.config.reward_model": ["RewardModelConfig"],
    "verl.workers.config.rollout": ["RolloutConfig"],
}


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found |= leaves(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def sections_below(section: BaseConfig) -> Iterator[BaseConfig]:
    yield section
    for item in fields(section):
        value = vars(section)[item.name]
        if isinstance(value, BaseConfig):
            yield from sections_below(value)


def every_section() -> list[BaseConfig]:
    tops = [root() for root in ROOTS.values()]
    tops += [VeOmniEngineConfig(), VeOmniOptimizerConfig(), TrainingWorkerConfig(), ProfileConfig()]
    return [section for top in tops for section in sections_below(top)]


@pytest.mark.parametrize("name", SURFACE)
def test_every_public_key_exists_with_its_default(name: str):
    tree = OmegaConf.to_container(OmegaConf.create(default_tree(ROOTS[name]())), resolve=True)
    assert isinstance(tree, dict)
    ours = leaves(tree)  # pyright: ignore[reportArgumentType]
    expected = SURFACE[name]
    assert {key: ours.get(key, "absent") for key in expected} == expected


def test_the_list_of_public_keys_is_not_empty():
    sizes = {name: len(keys) for name, keys in SURFACE.items()}
    assert sizes == {
        "ppo_trainer": 563,
        "ppo_megatron_trainer": 612,
        "sft_trainer": 73,
        "sft_trainer_engine": 117,
        "evaluation": 9,
        "generation": 43,
    }


def test_veomni_sections_have_their_public_defaults():
    sizes = "data_parallel data_parallel_replicate data_parallel_shard tensor_parallel"
    sizes += " expert_parallel pipeline_parallel context_parallel ulysses_parallel"
    engine = {f"{size}_size": 1 for size in sizes.split()} | {
        "param_offload": False,
        "optimizer_offload": False,
        "data_parallel_mode": "fsdp2",
        "mixed_precision": True,
        "seed": 42,
        "full_determinism": False,
        "init_device": "meta",
        "enable_full_shard": True,
        "ckpt_manager": "dcp",
        "forward_prefetch": True,
        "strategy": "veomni",
        "use_torch_compile": False,
        "forward_only": False,
        "enable_fsdp_offload": False,
        "enable_reentrant": False,
        "attn_implementation": "flash_attention_2",
        "moe_implementation": "fused",
        "force_use_huggingface": False,
        "activation_gpu_limit": 0.0,
    }
    optim = {
        "optimizer": "adamw",
        "lr": 1e-3,
        "lr_min": 0,
        "lr_start": 0,
        "lr_warmup_steps_ratio": 0,
        "lr_decay_ratio": 1.0,
        "total_training_steps": -1,
        "weight_decay": 0.01,
        "lr_warmup_steps": -1,
        "betas": [0.9, 0.999],
        "clip_grad": 1.0,
        "lr_scheduler_type": "cosine",
        "override_optimizer_config": {},
    }
    assert engine.items() <= dict(VeOmniEngineConfig()).items()
    ours = dict(VeOmniOptimizerConfig())
    assert {key: ours[key] for key in optim} == optim


def test_every_option_says_what_it_does_in_a_sentence():
    for section in every_section():
        cls = type(section)
        assert summary(cls).endswith("."), cls
        for item in fields(cls):
            if item.name != "_target_":
                sentence = sentences(cls).get(item.name, "")
                assert len(sentence) > 8, f"{cls.__name__}.{item.name}"
                assert sentence.endswith((".", "...")), f"{cls.__name__}.{item.name}"


def test_a_subclass_that_changes_a_default_inherits_the_sentence():
    assert sentences(McoreActorConfig)["optim"] == sentences(ActorConfig)["optim"]


def test_every_target_names_a_class_that_can_hold_its_section():
    for section in every_section():
        if section["_target_"]:
            module, _, name = section["_target_"].rpartition(".")
            assert isinstance(section, getattr(import_module(module), name)), section["_target_"]


@pytest.mark.parametrize("module", PUBLIC_NAMES)
def test_old_import_paths_give_dataclasses_of_the_schema(module: str):
    for name in PUBLIC_NAMES[module]:
        cls = getattr(import_module(module), name)
        assert issubclass(cls, BaseConfig)
        assert cls.__module__.startswith("verl.config.")


def test_build_optimizer_is_reached_through_the_facades():
    from verl.workers.config import build_optimizer
    from verl.workers.config.optimizer import build_optimizer as same

    assert build_optimizer is same
    with pytest.raises(AttributeError, match="no attribute 'build_optimiser'"):
        import_module("verl.workers.config").build_optimiser  # noqa: B018


def test_the_roots_are_named_after_their_files():
    assert ROOTS["ppo_trainer"] is PPOConfig
    assert ROOTS["ppo_megatron_trainer"] is PPOMegatronConfig


def test_a_value_outside_its_rule_is_refused_with_the_rule():
    with pytest.raises(ValueError, match="loss_agg_mode is 'mean'; it must be one of: token-mean"):
        ActorConfig(loss_agg_mode="mean")
    with pytest.raises(ValueError, match=r"clip_ratio_c is 1\.0; it must be greater than 1"):
        ActorConfig(clip_ratio_c=1.0)
    with pytest.raises(ValueError, match="ppo_mini_batch_size is 0; it must be at least 1"):
        FSDPActorConfig(ppo_mini_batch_size=0)


def test_names_that_users_may_register_are_open():
    actor = ActorConfig(strategy="mine")
    config = PPOConfig()
    rollout = type(config.actor_rollout_ref.rollout)(name="my_engine")
    algorithm = type(config.algorithm)(adv_estimator="my_estimator")
    assert (actor.strategy, rollout.name, algorithm.adv_estimator) == (
        "mine",
        "my_engine",
        "my_estimator",
    )


def test_only_what_workers_fill_in_can_change():
    actor = FSDPActorConfig()
    actor.global_batch_info = {"dp_size": 2}
    actor.ppo_mini_batch_size = 32
    assert actor.global_batch_info["dp_size"] == 2
    with pytest.raises(FrozenInstanceError):
        actor.clip_ratio = 0.3  # pyright: ignore[reportAttributeAccessIssue]


def test_runtime_values_are_no_options():
    names = {item.name for item in fields(FSDPEngineConfig) if not is_option(item)}
    assert names == {
        "_target_",
        "use_dynamic_bsz",
        "max_token_len_per_gpu",
        "micro_batch_size_per_gpu",
        "infer_max_token_len_per_gpu",
        "infer_micro_batch_size_per_gpu",
        "use_fused_kernels",
        "use_remove_padding",
    }
    for section in every_section():
        for item in fields(section):
            if "runtime" in item.metadata:
                assert item.name in section._mutable_fields, (type(section), item.name)


def test_two_actors_do_not_share_their_lists():
    first, second = OptimizerConfig(), OptimizerConfig()
    first.betas.append(1.0)
    assert second.betas == [0.9, 0.999]


def test_profilers_unite_and_intersect_their_ranks():
    some = ProfilerConfig(tool="torch", enable=True, ranks=[0, 1])
    others = ProfilerConfig(tool="torch", enable=False, ranks=[1, 2])
    everywhere = ProfilerConfig(tool="torch", enable=True, all_ranks=True)
    assert some.union(others).ranks == [0, 1, 2]
    assert some.union(others).enable
    assert some.intersect(others).ranks == [1]
    assert not some.intersect(others).enable
    assert everywhere.intersect(some).ranks == [0, 1]
    assert some.intersect(everywhere).ranks == [0, 1]
    assert not everywhere.intersect(some).all_ranks
    assert some.union(everywhere).all_ranks


def test_profilers_of_different_tools_do_not_combine():
    with pytest.raises(ValueError, match="'torch' and 'nsys'"):
        ProfilerConfig(tool="torch").union(ProfilerConfig(tool="nsys"))


def test_importing_the_schema_is_cheap():
    program = (
        "import sys, time; start = time.process_time(); import verl.config; "
        "seconds = time.process_time() - start; "
        "heavy = {'torch', 'numpy', 'transformers', 'ray', 'tensordict'} & set(sys.modules); "
        "print(seconds, *heavy)"
    )
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    seconds, *heavy = finished.stdout.split()
    assert heavy == []
    assert float(seconds) < 2.0  # about 0.2 s; the rest is room for a busy machine
