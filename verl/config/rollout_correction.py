"""Correcting for responses that were sampled from a slightly different policy.

The rollout engine and the trainer never agree exactly. With r = p_train / p_rollout per token,
responses are weighted by r (importance sampling, truncated) and dropped where r strays too far
(rejection sampling). *Decoupled* keeps three policies: rollout, old and current. *Bypass* takes
the rollout's log-probabilities as the old ones and saves a forward pass. The class methods are
the combinations people use. Needs `rollout.calculate_log_probs=True`.
"""

from dataclasses import dataclass
from typing import Any

from verl.config.base import BaseConfig, When, option, while_on

Bound = str | float
IS_THRESHOLD = 2.0
GEO_BAND = "0.999_1.001"
K3_BOUND = 0.01
BYPASS_CLIP: dict[str, Any] = {"bypass_mode": True, "loss_type": "ppo_clip"}
BYPASS_GRADIENT: dict[str, Any] = {"bypass_mode": True, "loss_type": "reinforce"}


@dataclass(kw_only=True)
class RolloutCorrectionConfig(BaseConfig):
    """Importance weights and rejection; the YAML default is `disabled()`."""

    _target_: str = "verl.trainer.config.RolloutCorrectionConfig"

    rollout_is: str | None = option("sequence", choices=("token", "sequence"))
    """Importance weights per token or per sequence; null uses none."""

    rollout_is_threshold: float = option(
        IS_THRESHOLD,
        above=0,
        used_if=When(lambda here, run: here.rollout_is is not None, "rollout_is is null"),
    )
    """Weights above this are cut to it."""

    rollout_is_batch_normalize: bool = option(
        False, used_if=When(lambda here, run: here.rollout_is is not None, "rollout_is is null")
    )
    """Scale the weights of a batch to a mean of 1."""

    rollout_rs: str | None = None
    """Rejection criteria, separated by commas: `token_k1`, `seq_sum_k1`, `seq_mean_k3`,
    `seq_max_k2`, ...; null rejects nothing."""

    rollout_rs_threshold: str | float | None = option(
        None, used_if=When(lambda here, run: here.rollout_rs is not None, "rollout_rs is null")
    )
    """Bound of each criterion, or one for all, separated by commas: `low_high` (or one number x for
    1/x to x) on the ratio for k1, an upper bound for k2 and k3."""

    bypass_mode: bool = False
    """Take the rollout's log-probabilities as the old policy's instead of computing them again."""

    loss_type: str = option(
        "ppo_clip",
        choices=("ppo_clip", "reinforce"),
        used_if=while_on("bypass_mode"),
    )
    """Policy loss in bypass mode: clipping alone, or explicit importance weights."""

    @classmethod
    def decoupled_token_is(cls, threshold: float = IS_THRESHOLD) -> "RolloutCorrectionConfig":
        """A truncated weight for each token."""
        return cls(**_weigh("token", threshold))

    @classmethod
    def decoupled_seq_is(cls, threshold: float = IS_THRESHOLD) -> "RolloutCorrectionConfig":
        """A truncated weight for each sequence."""
        return cls(**_weigh("sequence", threshold))

    @classmethod
    def decoupled_seq_is_rs(
        cls, is_threshold: float = IS_THRESHOLD, rs_threshold: Bound = "0.5_2.0"
    ) -> "RolloutCorrectionConfig":
        """Sequence weights, and no sequence whose ratio leaves the band."""
        return cls(**_weigh("sequence", is_threshold), **_reject("seq_sum_k1", rs_threshold))

    @classmethod
    def decoupled_geo_rs(cls, rs_threshold: Bound = GEO_BAND) -> "RolloutCorrectionConfig":
        """No weights; no sequence whose geometric mean ratio leaves the band."""
        return cls(rollout_is=None, **_reject("seq_mean_k1", rs_threshold))

    @classmethod
    def decoupled_geo_rs_seq_tis(
        cls, is_threshold: float = IS_THRESHOLD, rs_threshold: Bound = GEO_BAND
    ) -> "RolloutCorrectionConfig":
        """The geometric band with sequence weights."""
        return cls(**_weigh("sequence", is_threshold), **_reject("seq_mean_k1", rs_threshold))

    @classmethod
    def decoupled_geo_rs_token_tis(
        cls, is_threshold: float = IS_THRESHOLD, rs_threshold: Bound = GEO_BAND
    ) -> "RolloutCorrectionConfig":
        """The geometric band with token weights."""
        return cls(**_weigh("token", is_threshold), **_reject("seq_mean_k1", rs_threshold))

    @classmethod
    def decoupled_k3_rs(cls, rs_threshold: Bound = K3_BOUND) -> "RolloutCorrectionConfig":
        """No weights; no sequence whose mean k3 divergence exceeds the bound."""
        return cls(rollout_is=None, **_reject("seq_mean_k3", rs_threshold))

    @classmethod
    def decoupled_k3_rs_seq_tis(
        cls, is_threshold: float = IS_THRESHOLD, rs_threshold: Bound = K3_BOUND
    ) -> "RolloutCorrectionConfig":
        """The k3 bound with sequence weights."""
        return cls(**_weigh("sequence", is_threshold), **_reject("seq_mean_k3", rs_threshold))

    @classmethod
    def decoupled_k3_rs_token_tis(
        cls, is_threshold: float = IS_THRESHOLD, rs_threshold: Bound = K3_BOUND
    ) -> "RolloutCorrectionConfig":
        """The k3 bound with token weights."""
        return cls(**_weigh("token", is_threshold), **_reject("seq_mean_k3", rs_threshold))

    @classmethod
    def bypass_ppo_clip(cls) -> "RolloutCorrectionConfig":
        """PPO's clip relative to the rollout policy; the ratio is the correction."""
        return cls(rollout_is=None, **BYPASS_CLIP)

    @classmethod
    def bypass_ppo_clip_geo_rs(cls, rs_threshold: Bound = GEO_BAND) -> "RolloutCorrectionConfig":
        """PPO's clip relative to the rollout policy, with the geometric band."""
        return cls(rollout_is=None, **_reject("seq_mean_k1", rs_threshold), **BYPASS_CLIP)

    @classmethod
    def bypass_ppo_clip_k3_rs(cls, rs_threshold: Bound = K3_BOUND) -> "RolloutCorrectionConfig":
        """PPO's clip relative to the rollout policy, with the k3 bound."""
        return cls(rollout_is=None, **_reject("seq_mean_k3", rs_threshold), **BYPASS_CLIP)

    @classmethod
    def bypass_pg_is(cls, threshold: float = IS_THRESHOLD) -> "RolloutCorrectionConfig":
        """Policy gradient with sequence weights."""
        return cls(**_weigh("sequence", threshold), **BYPASS_GRADIENT)

    @classmethod
    def bypass_pg_geo_rs(cls, rs_threshold: Bound = GEO_BAND) -> "RolloutCorrectionConfig":
        """Policy gradient without weights, with the geometric band."""
        return cls(rollout_is=None, **_reject("seq_mean_k1", rs_threshold), **BYPASS_GRADIENT)

    @classmethod
    def bypass_pg_geo_rs_seq_tis(
        cls, is_threshold: float = IS_THRESHOLD, rs_threshold: Bound = GEO_BAND
    ) -> "RolloutCorrectionConfig":
        """Policy gradient with sequence weights and the geometric band."""
        corrections = _weigh("sequence", is_threshold) | _reject("seq_mean_k1", rs_threshold)
        return cls(**corrections, **BYPASS_GRADIENT)

    @classmethod
    def bypass_pg_geo_rs_token_tis(
        cls, is_threshold: float = IS_THRESHOLD, rs_threshold: Bound = GEO_BAND
    ) -> "RolloutCorrectionConfig":
        """Policy gradient with token weights and the geometric band."""
        corrections = _weigh("token", is_threshold) | _reject("seq_mean_k1", rs_threshold)
        return cls(**corrections, **BYPASS_GRADIENT)

    @classmethod
    def disabled(cls) -> "RolloutCorrectionConfig":
        """No weights and no rejection: train on the responses as they are."""
        return cls(rollout_is=None)


def _weigh(level: str, threshold: float) -> dict[str, Any]:
    return {"rollout_is": level, "rollout_is_threshold": threshold}


def _reject(criterion: str, threshold: Bound) -> dict[str, Any]:
    return {"rollout_rs": criterion, "rollout_rs_threshold": threshold}
