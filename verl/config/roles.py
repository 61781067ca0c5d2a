"""The roles of a run, their ranks, the names they may use, and conditions that sections share.

The upper layers register estimators, losses, engines and trackers; this layer cannot import them,
so the built-in names are listed here and a test compares the lists. Users' code may register more.

A role runs on all devices of the run, or on those that `resource_pool.<role>.devices` lists. Ranks
that share one sequence (sequence, tensor, pipeline or context parallel) count once as a
data-parallel rank.

The constants at the end are conditions of `option(..., used_if=...)`. Sections import this module,
so it tells their variants apart by their keys and not by their classes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from verl.config.base import Absent, BaseConfig, When, never, while_on
from verl.utils.environment import external_modules

GROUP_ESTIMATORS = (
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "gdpo",
    "gpg",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_vectorized",
    "sppo",
    "tir_optimal_token_baseline",
)
ESTIMATORS = (*GROUP_ESTIMATORS, "gae", "reinforce_plus_plus", "remax")
POLICY_LOSSES = (
    "vanilla",
    "bypass_mode",
    "cispo",
    "clip_cov",
    "dpo",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geo_mean",
    "gpg",
    "gspo",
    "gvpo",
    "kl_cov",
    "sapo",
    "sppo",
)
SEQUENCE_LOSSES = ("dpo", "gvpo", "sppo")
"""On the log-ratio of whole sequences; their aggregation is their own."""


@dataclass(frozen=True, kw_only=True)
class RolloutTraits:
    """Facts about a rollout engine that hold whatever its options are."""

    has_own_process: bool = True
    """It runs apart from the worker, and weights are sent to it."""

    is_builtin: bool = False
    """It is ours: log-probs always come back, and it has no settings of another package."""

    package: str | None = None
    """The package that must be installed; None: nothing beyond ours."""

    versions: str = ""
    """Versions of the package that are supported, as pip writes them; empty: not stated."""

    is_divisible: bool = True
    """One engine may span several devices."""

    takes_adapters: bool = False
    """Updates may bring the tensors of a LoRA adapter alone."""

    process_name: str | None = None
    """The name of the same engine in a process of its own, if that is another name."""


ROLLOUTS = {
    "native": RolloutTraits(has_own_process=False, is_builtin=True, process_name="native_process"),
    "hf": RolloutTraits(has_own_process=False, is_builtin=True, is_divisible=False),
    "native_process": RolloutTraits(is_builtin=True, is_divisible=False),
    "vllm": RolloutTraits(package="vllm", versions=">=0.24,<0.33", takes_adapters=True),
    "sglang": RolloutTraits(package="sglang", takes_adapters=True),
}


def rollout_traits(name: str) -> RolloutTraits:
    """Those of a built-in name; engines that users register run in processes of their own."""
    return ROLLOUTS.get(name, RolloutTraits())


AGENT_LOOPS = (
    "single_turn_agent",
    "tool_agent",
    "env_agent",
    "program_agent",
    "collabllm_agent",
)
RECIPES: tuple[str, ...] = ("online_dpo", "pf_ppo", "prime", "spin")
PAIR_RECIPES = ("online_dpo", "spin")
"""Recipes that turn rewards into pairs, and have no advantage estimator."""
STRATEGIES = ("fsdp", "fsdp2", "megatron", "veomni")
POOL_ROLES = ("actor_rollout_ref", "critic", "reward_model", "rollout")

# Tracker -> the package it needs (None: nothing).
TRACKERS: dict[str, str | None] = {
    "console": None,
    "file": None,
    "wandb": "wandb",
    "tracking": "wandb",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "vemlp_wandb": "volcengine_ml_platform",
    "tensorboard": "tensorboard",
    "clearml": "clearml",
    "trackio": "trackio",
}


@dataclass(frozen=True)
class Roles:
    """Which optional roles a run has."""

    has_critic: bool
    has_reference: bool

    @classmethod
    def of(cls, config: Any) -> "Roles":
        return cls(needs_critic(config), needs_reference(config))


def needs_critic(config: Any) -> bool:
    """Whether the run trains a value model: as told, or when the estimator is GAE."""
    if config.critic.enable is not None:
        return config.critic.enable
    return config.algorithm.adv_estimator == "gae"


def needs_reference(config: Any) -> bool:
    """Whether the run has a reference policy: when some KL is taken to it, or DPO compares with
    it."""
    actor = config.actor_rollout_ref.actor
    is_compared = actor.policy_loss.loss_mode == "dpo" and not actor.dpo_reference_free
    return config.algorithm.use_kl_in_reward or actor.use_kl_loss or is_compared


def uses_lora(config: Any) -> bool:
    return has_lora(config.actor_rollout_ref.model)


def has_lora(model: Any) -> bool:
    """Whether a section of a language model asks for LoRA."""
    return model.lora_rank > 0 or model.lora.rank > 0 or model.lora_adapter_path is not None


def is_own_reference(config: Any) -> bool:
    """Whether the policy itself, its adapters taken off, serves as reference."""
    return uses_lora(config) and config.actor_rollout_ref.ref.model.path is None


def critic_lora_rank(config: Any) -> int:
    """The rank of the critic's adapters; 0 for one that trains all weights, or none."""
    model = config.critic.model
    if not needs_critic(config):
        return 0
    return model.lora_rank if "lora_rank" in model else model.lora.rank


def world_size(config: Any) -> int:
    """All devices of the run."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def pool_devices(config: Any, role: str) -> list[int] | None:
    """The devices that `resource_pool` gives to a role (`actor_rollout_ref`, `critic`,
    `reward_model`, `rollout`), or None when it gives it none and the role shares all."""
    pools: dict[str, Any] = config.resource_pool
    pool = pools.get(role)
    devices = pool.get("devices") if isinstance(pool, dict) else None
    return devices if isinstance(devices, list) and devices else None


def role_ranks(config: Any, role: str) -> int:
    devices = pool_devices(config, role)
    return world_size(config) if devices is None else len(devices)


def rollout_ranks(config: Any) -> int:
    """Ranks that generate: those of the policy, or with a pool of their own those of the pool."""
    section = config.actor_rollout_ref
    if section.hybrid_engine:
        return role_ranks(config, "actor_rollout_ref")
    devices = pool_devices(config, "rollout")
    return ranks_beside(config) if devices is None else len(devices)


def ranks_beside(config: Any) -> int:
    """Ranks that generate on devices beside those of the trainer."""
    section, is_listed = config.actor_rollout_ref, pool_devices(config, "rollout") is not None
    if section.hybrid_engine or is_listed:
        return 0
    return section.rollout.nnodes * section.rollout.n_gpus_per_node


def teacher_ranks(config: Any) -> int:
    """Ranks that only teach, on devices beside those of the trainer and of generation."""
    section = config.distillation
    return section.nnodes * section.n_gpus_per_node if section.enabled else 0


def engine_of(config: Any, role: str) -> Any:
    """The section that says how a role's model is spread over its ranks."""
    if role == "critic":
        critic = config.critic
        return critic.megatron if "megatron" in critic else critic.model.fsdp_config
    actor = config.actor_rollout_ref.actor
    return actor.megatron if "megatron" in actor else actor.fsdp_config


def ranks_per_sequence(engine: BaseConfig) -> int:
    """Ranks that work on the same sequence."""
    if "ulysses_sequence_parallel_size" in engine:
        return engine.ulysses_sequence_parallel_size
    return (
        engine.tensor_model_parallel_size
        * engine.pipeline_model_parallel_size
        * engine.context_parallel_size
    )


def data_parallel_size(config: Any, role: str = "actor_rollout_ref") -> int:
    """Ranks of a role that see different sequences."""
    return max(1, role_ranks(config, role) // ranks_per_sequence(engine_of(config, role)))


def has_whole_weights(config: Any) -> bool:
    """Whether every rank of the policy is sure to hold the whole model."""
    engine = engine_of(config, "actor_rollout_ref")
    is_zero1 = engine.get("sharding") == "zero1"
    return role_ranks(config, "actor_rollout_ref") == 1 or is_zero1


def shares_weights(config: Any) -> bool:
    """Whether the rollout engine is sure to generate with the policy's own weights."""
    section = config.actor_rollout_ref
    is_here = section.hybrid_engine and section.rollout.name in ("native", "hf")
    return is_here and has_whole_weights(config) and not section.model.lora.merge


def sequence_ranks(config: Any) -> int:
    """Ranks that get the same rows in a supervised run."""
    section = config.engine if "engine" in config else config
    if "tensor_model_parallel_size" in section:
        return ranks_per_sequence(section)
    return max(1, section.get("ulysses_sequence_parallel_size", 1))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{', '.join(known)}{hint}"


def is_training(run: Any) -> bool:
    """Whether this is the configuration of RL training, and not of another command."""
    return "actor_rollout_ref" in run


def runs_prime(run: Any) -> bool:
    """Whether the reward model is PRIME's: a language model that is trained beside the policy."""
    return is_training(run) and "trainer" in run and run.trainer.get("recipe") == "prime"


def async_mode(run: Any) -> str:
    """How training and generation overlap: `sync`, or a mode of `verl.config.async_plan`."""
    if not is_training(run):
        return "sync"
    mode, trainer = run.async_training.mode, run.trainer
    return trainer.v1.trainer_mode if mode == "sync" and trainer.use_v1 else mode


def may_register_names(config: Any) -> bool:
    """Modules that the user has imported may register estimators, losses, engines and loops."""
    return bool(config.actor_rollout_ref.model.external_lib or external_modules())


def has_own_loops(here: Any, run: Any) -> bool:
    """Whether agent loops of the user's own may read what no built-in loop reads."""
    if not is_training(run):
        return False
    agent = run.actor_rollout_ref.rollout.agent
    is_named = agent.agent_loop_config_path or agent.agent_loop_manager_class
    is_environment = agent.default_agent_loop == "env_agent"
    return bool(is_named) or is_environment or may_register_names(run)


def has_several_turns(here: Any, run: Any) -> bool:
    """Whether rows that name no loop run one with tools, users or environments."""
    if not is_training(run):
        return False
    rollout = run.actor_rollout_ref.rollout
    is_single = rollout.agent.default_agent_loop == "single_turn_agent"
    return rollout.multi_turn.enable or not is_single or has_own_loops(here, run)


ON_GPU = When(
    lambda here, run: run.trainer.device != "cpu",
    "trainer.device is cpu: nothing is compiled there, and memory is not measured",
)
SEVERAL_RANKS = When(
    lambda here, run: is_training(run) and world_size(run) > 1, "one rank divides nothing"
)
SHARDED = When(
    lambda here, run: (
        is_training(run) and world_size(run) > 1 and here.get("sharding", "full") != "zero1"
    ),
    "weights are not sharded: there is one rank, or sharding is zero1",
)
PACKED = When(
    lambda here, run: (
        is_training(run) and ranks_per_sequence(engine_of(run, "actor_rollout_ref")) > 1
    ),
    "rows are always packed without padding; the numbers are those of padded rows",
)
PACKED_CRITIC = When(
    lambda here, run: ranks_per_sequence(engine_of(run, "critic")) > 1, PACKED.reason
)
CHUNKED = never("the entropy is always computed in chunks, and again in the backward pass")
FUSED = never("log-probabilities and entropy always have a fused kernel, which stores no logits")
NEW_ADAPTERS = (
    When(lambda here, run: has_lora(here), "no LoRA: lora_rank is 0"),
    When(
        lambda here, run: here.lora_adapter_path is None,
        "the adapter in lora_adapter_path brings its own",
    ),
)
FOREIGN_ENGINE = When(
    lambda here, run: not rollout_traits(here.name).is_builtin,
    "the built-in engine has no such setting",
)
OWN_PROCESS = When(
    lambda here, run: rollout_traits(here.name).has_own_process,
    "the built-in engine runs in the trainer's processes",
)
KEEPS_CONVERSATIONS = When(
    lambda here, run: here.name in ("native", "native_process"),
    "only the built-in engine keeps keys and values across an update; others compute them anew",
)
SGLANG_SERVER = When(
    lambda here, run: (run.actor_rollout_ref if is_training(run) else run).rollout.name == "sglang",
    "only SGLang is reached over HTTP",
)
SEVERAL_TURNS = When(
    has_several_turns,
    "multi_turn.enable is off and the default loop is single_turn_agent, which has one turn and no "
    "tools; only rows that name another loop (agent_name) use it",
)
OWN_LOOPS = When(
    lambda here, run: (
        has_own_loops(here, run)
        or (
            is_training(run)
            and run.actor_rollout_ref.rollout.agent.default_agent_loop == "collabllm_agent"
        )
    ),
    "only the loop collabllm_agent reads it, and the run names no loop of yours",
)
WITH_CRITIC = When(
    lambda here, run: needs_critic(run),
    "there is no critic: algorithm.adv_estimator does not use one",
)
REWARD_MODEL = while_on("enable")
DISTILLED = When(lambda here, run: run.distillation.enabled, "distillation.enabled is off")
FILTERED = When(
    lambda here, run: here.filter_accuracy or here.filter_truncate,
    "filter_accuracy and filter_truncate are off: each step draws what it trains on",
)
PRIME = When(lambda here, run: runs_prime(run), "only the recipe prime uses it")
NOT_PRIME = When(
    lambda here, run: not runs_prime(run), "the recipe prime gives its model the policy's tokens"
)
LIMITED = When(
    lambda here, run: run.reward_manager.name in ("rate_limited", "judge"),
    "only the reward managers rate_limited and judge use it",
)


def engine_size(rollout: Any) -> int:
    """Devices of one engine."""
    parts = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    return parts * rollout.pipeline_model_parallel_size


def replicas(config: Any) -> int:
    """Engines that generate side by side."""
    ranks = rollout_ranks(config)
    return max(1, ranks // engine_size(config.actor_rollout_ref.rollout))


def engine_has_whole_weights(config: Any) -> bool:
    """Whether every rank is sure to hold the whole model, and an engine is one rank."""
    is_alone = role_ranks(config, "actor_rollout_ref") == 1
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    return is_alone or (has_whole_weights(config) and size == 1)


PROFILED = (
    When(lambda here, run: here.tool is not None, "no tool: global_profiler.tool is null"),
    When(
        lambda here, run: not is_training(run) or bool(run.global_profiler.steps),
        "global_profiler.steps is null: no step is profiled",
    ),
)
ON_RAY = When(
    lambda here, run: (
        run.trainer.controller == "ray"
        or (
            run.trainer.controller == "auto"
            and world_size(run) + ranks_beside(run) + teacher_ranks(run) > 1
        )
    ),
    "the run does not use Ray",
)
RECORDED_WITH_ACTOR = never("the actor's ranks record: actor_rollout_ref.actor.profiler")
FULLY_ASYNC = When(
    lambda here, run: async_mode(run) == "fully_async",
    "the run is not fully asynchronous: start it with "
    "verl.experimental.fully_async_policy.fully_async_main, or set async_training.mode=fully_async",
)
RANDOM_WEIGHTS = Absent(
    "training starts from weights: scripts/init_random_model.py writes random ones to a folder",
    values=(False,),
)
ROUTE_FILES = Absent("routes travel with the batch, not in files: leave it out")
BACK_END = Absent(
    "this training back-end is not built in yet: use fsdp or megatron", values=("veomni",)
)
