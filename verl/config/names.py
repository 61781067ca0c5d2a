"""Names that a configuration may use for things of the upper layers, and which roles a run has.

The upper layers register estimators, losses, engines and trackers; this layer cannot import them,
so the built-in names are listed here and a test compares the lists. Users' code may register more.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "gpg",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "rloo_vectorized",
    "tir_optimal_token_baseline",
)
GROUP_ESTIMATORS = (
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "gpg",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_vectorized",
    "tir_optimal_token_baseline",
)
POLICY_LOSSES = (
    "vanilla",
    "bypass_mode",
    "cispo",
    "clip_cov",
    "geo_mean",
    "gpg",
    "gspo",
    "kl_cov",
    "sapo",
)
ROLLOUTS = ("native", "native_process", "hf", "vllm", "sglang", "trtllm")
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
    """Whether the run has a reference policy: exactly when some KL is taken to it."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def uses_lora(config: Any) -> bool:
    model = config.actor_rollout_ref.model
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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{', '.join(known)}{hint}"
