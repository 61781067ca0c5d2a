"""The configuration of an RL run, `ppo_trainer.yaml`, and its Megatron variant.

Both have the same sections; the variant differs in the back-end options of the actor, the
reference policy, the critic and the reward model.
"""

from dataclasses import dataclass
from typing import Any

from verl.config.actor import ActorConfig, FSDPActorConfig, McoreActorConfig
from verl.config.algorithm import AlgoConfig
from verl.config.async_training import AsyncTrainingConfig
from verl.config.base import BaseConfig, When, option
from verl.config.critic import CriticConfig, FSDPCriticConfig, McoreCriticConfig
from verl.config.data import DataConfig
from verl.config.distillation import DistillationConfig
from verl.config.model import HFModelConfig, McoreModelConfig
from verl.config.profiler import GlobalProfilerConfig
from verl.config.ref import FSDPRefConfig, McoreRefConfig, RefConfig
from verl.config.reward import (
    CustomRewardFunctionConfig,
    FSDPRewardModelConfig,
    McoreRewardModelConfig,
    RewardManagerConfig,
    RewardModelConfig,
)
from verl.config.roles import DISTILLED, ON_RAY, WITH_CRITIC, needs_reference
from verl.config.rollout import McoreRolloutConfig, RolloutConfig
from verl.config.trainer import RayKwargsConfig, TrainerConfig, TransferQueueConfig


@dataclass(kw_only=True)
class EnvConfig(BaseConfig):
    """The world of the agent loop `env_agent`, and the processes that worlds run in."""

    name: str | None = None
    """Environment of rows without an `env` of their own: `gymnasium:FrozenLake-v1`,
    `textarena:GuessTheNumber-v0`, `package.module.Class` or `path/to/file.py:Class`."""

    kwargs: dict[str, Any] = option(default_factory=dict)
    """Arguments of that environment."""

    python: str | None = None
    """Interpreter of an environment that needs packages of its own; null is this one."""

    num_workers: int = option(64, minimum=1)
    """Most environments at a time, each in a process; further trajectories wait."""

    timeout_seconds: float = option(60.0, above=0)
    """Longest call of an environment; then its process is killed and its trajectory dropped."""

    max_observation_length: int = option(8192, minimum=1)
    """Longest text of an observation, in characters; the middle of a longer one is cut out."""


@dataclass(kw_only=True)
class ActorRolloutRefConfig(BaseConfig):
    """The policy in its three roles: trained, generating, and frozen as a reference."""

    hybrid_engine: bool = True
    """Training and generation share devices. Off, generation has ranks of its own: `rollout.nnodes`
    times `rollout.n_gpus_per_node`, or `resource_pool.rollout.devices`."""

    nccl_timeout: int = option(600, minimum=1)
    """Seconds after which a collective operation counts as hung."""

    model: HFModelConfig = option(default_factory=HFModelConfig)
    """The model of all three roles."""

    actor: ActorConfig = option(default_factory=FSDPActorConfig)
    """The policy being trained."""

    rollout: RolloutConfig = option(default_factory=RolloutConfig)
    """Generation."""

    ref: RefConfig = option(
        default_factory=FSDPRefConfig,
        used_if=When(
            lambda here, run: needs_reference(run) or run.distillation.enabled,
            "there is no reference: actor.use_kl_loss and algorithm.use_kl_in_reward are off, and "
            "no teacher, which would be run like one: distillation.enabled is off",
        ),
    )
    """The reference policy."""


@dataclass(kw_only=True)
class McoreActorRolloutRefConfig(ActorRolloutRefConfig):
    """The three roles on Megatron."""

    model: HFModelConfig = option(default_factory=McoreModelConfig)

    actor: ActorConfig = option(default_factory=McoreActorConfig)

    rollout: RolloutConfig = option(default_factory=McoreRolloutConfig)

    ref: RefConfig = option(default_factory=McoreRefConfig)


@dataclass(kw_only=True)
class PPOConfig(BaseConfig):
    """RL training with FSDP, or on one device."""

    data: DataConfig = option(default_factory=DataConfig)
    """Prompts for training and validation."""

    actor_rollout_ref: ActorRolloutRefConfig = option(default_factory=ActorRolloutRefConfig)
    """The policy in its three roles: trained, generating, and frozen as a reference."""

    critic: CriticConfig = option(default_factory=FSDPCriticConfig, used_if=WITH_CRITIC)
    """The value model."""

    reward_model: RewardModelConfig = option(default_factory=FSDPRewardModelConfig)
    """A model that scores responses, and how rewards are computed in general."""

    reward_manager: RewardManagerConfig = option(default_factory=RewardManagerConfig)
    """How samples reach the reward function."""

    custom_reward_function: CustomRewardFunctionConfig = option(
        default_factory=CustomRewardFunctionConfig
    )
    """A reward function of your own."""

    env: EnvConfig = option(default_factory=EnvConfig)
    """The world of the agent loop `env_agent`."""

    algorithm: AlgoConfig = option(default_factory=AlgoConfig)
    """From rewards to advantages."""

    distillation: DistillationConfig = option(default_factory=DistillationConfig, used_if=DISTILLED)
    """Learning from what teachers say about the student's responses."""

    trainer: TrainerConfig = option(default_factory=TrainerConfig)
    """How long, on what, how often it saves, and where it reports."""

    resource_pool: dict[str, Any] = option(default_factory=dict)
    """Which devices a role runs on, as `<role>.devices: [0, 1]`; roles not named share all devices.
    Roles: `actor_rollout_ref`, `critic`, `reward_model`, and `rollout` without `hybrid_engine`."""

    global_profiler: GlobalProfilerConfig = option(default_factory=GlobalProfilerConfig)
    """Which steps of the run are profiled, and with what."""

    async_training: AsyncTrainingConfig = option(default_factory=AsyncTrainingConfig)
    """Training on responses of earlier policies while the next ones are generated."""

    transfer_queue: TransferQueueConfig = option(default_factory=TransferQueueConfig)
    """Batches kept in a distributed store."""

    ray_kwargs: RayKwargsConfig = option(default_factory=RayKwargsConfig, used_if=ON_RAY)
    """Ray, where it is used."""


@dataclass(kw_only=True)
class PPOMegatronConfig(PPOConfig):
    """RL training with Megatron."""

    actor_rollout_ref: ActorRolloutRefConfig = option(default_factory=McoreActorRolloutRefConfig)

    critic: CriticConfig = option(default_factory=McoreCriticConfig)

    reward_model: RewardModelConfig = option(default_factory=McoreRewardModelConfig)
