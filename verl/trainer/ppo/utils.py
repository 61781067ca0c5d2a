"""The roles of a training run and which of them a configuration needs."""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from verl.config.ppo import PPOConfig
from verl.config.roles import needs_reference, runs_prime
from verl.single_controller.base import Worker

WorkerType = type[Worker]


class Role(Enum):
    """What a worker does. A worker with several duties has a role of its own."""

    Actor = auto()
    Rollout = auto()
    ActorRollout = auto()
    Critic = auto()
    RefPolicy = auto()
    RewardModel = auto()
    ActorRolloutRef = auto()
    Env = auto()
    Teacher = auto()

    def __str__(self) -> str:
        return _NAMES[self]

    @classmethod
    def from_string(cls, name: str) -> "Role":
        for role, known in _NAMES.items():
            if known == name:
                return role
        raise ValueError(f"unknown role {name!r}; the roles are: {', '.join(_NAMES.values())}")


_NAMES = {
    Role.Actor: "actor",
    Role.Rollout: "rollout",
    Role.ActorRollout: "actor_rollout",
    Role.Critic: "critic",
    Role.RefPolicy: "ref",
    Role.RewardModel: "rm",
    Role.ActorRolloutRef: "actor_rollout_ref",
    Role.Env: "env",
    Role.Teacher: "teacher",
}


def need_reference_policy(config: Any) -> bool:
    """Whether the KL term of the reward or the loss, or DPO, compares with a reference policy.

    Takes the configuration (a recipe's own may have no more than the keys of the KL), or a mapping
    from role to worker, which says so by holding the role.
    """
    if _is_role_mapping(config):
        return Role.RefPolicy in config
    if isinstance(config, PPOConfig):
        return needs_reference(config)
    return bool(config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss)


def need_reward_model(config: Any) -> bool:
    """Whether a frozen model scores responses. Takes what `need_reference_policy` takes.

    The implicit model of the recipe prime is trained and rewards tokens: it is the recipe's own.
    """
    if _is_role_mapping(config):
        return Role.RewardModel in config
    return bool(config.reward_model.enable) and not runs_prime(config)


def need_critic(config: Any) -> bool:
    """`critic.enable`; where that is null, only generalized advantage estimation needs values."""
    if config.critic.enable is not None:
        return bool(config.critic.enable)
    return config.algorithm.adv_estimator == "gae"


def _is_role_mapping(config: Any) -> bool:
    return isinstance(config, Mapping) and all(isinstance(key, Role) for key in config)
