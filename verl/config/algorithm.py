"""How rewards become advantages, and how training corrects for a rollout that drifted from it.

Names of estimators are open: anything registered with `@register_adv_est` may be chosen. The
arithmetic is in `verl.algos`.

The rollout engine and the trainer never agree exactly. With r = p_train / p_rollout per token,
responses are weighted by r (importance sampling, truncated) and dropped where r strays too far
(rejection sampling). *Decoupled* keeps three policies: rollout, old and current. *Bypass* takes
the rollout's log-probabilities as the old ones and saves a forward pass. The class methods of
`RolloutCorrectionConfig` are the combinations people use. Needs `rollout.calculate_log_probs=True`.
"""

from dataclasses import dataclass
from typing import Any

from verl.config.base import BaseConfig, When, option, while_on
from verl.config.roles import PRIME

KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_TYPES = KL_ESTIMATORS + tuple(f"{name}+" for name in KL_ESTIMATORS)
Bound = str | float
IS_THRESHOLD = 2.0
GEO_BAND = "0.999_1.001"
K3_BOUND = 0.01
BYPASS_CLIP: dict[str, Any] = {"bypass_mode": True, "loss_type": "ppo_clip"}
BYPASS_GRADIENT: dict[str, Any] = {"bypass_mode": True, "loss_type": "reinforce"}


def discounts(estimator: str | None) -> bool:
    estimator = estimator or ""
    return estimator in ("gae", "reinforce_plus_plus", "remax") or "optimal_token" in estimator


GAE = When(lambda here, run: here.adv_estimator == "gae", "only adv_estimator=gae uses it")


@dataclass(kw_only=True)
class KLControlConfig(BaseConfig):
    """The coefficient of the KL penalty in the reward."""

    _target_: str = "verl.trainer.config.KLControlConfig"

    type: str = option("fixed", choices=("fixed", "adaptive"))
    """Keep the coefficient, or steer it so that the KL stays near `target_kl`."""

    kl_coef: float = option(0.001, minimum=0)
    """Coefficient at the start. Counts only with `algorithm.use_kl_in_reward`."""

    horizon: int = option(
        10000,
        above=0,
        used_if=When(lambda here, run: here.type != "fixed", "kl_ctrl.type is fixed"),
    )
    """Samples over which an adaptive coefficient reacts; larger is slower."""

    target_kl: float = option(
        0.1, above=0, used_if=When(lambda here, run: here.type != "fixed", "kl_ctrl.type is fixed")
    )
    """KL per token that an adaptive coefficient aims at."""


@dataclass(kw_only=True)
class FilterGroupsConfig(BaseConfig):
    """Dynamic sampling (DAPO, arXiv:2503.14476): drop prompts whose responses all score alike."""

    _target_: str = "verl.trainer.config.FilterGroupsConfig"

    enable: bool = False
    """Keep generating until `data.train_batch_size` prompts with differing scores are found."""

    metric: str | None = None
    """What must differ within a prompt: `acc`, `score`, `seq_reward`, `seq_final_reward`, or any
    value that the reward function reports."""

    max_num_gen_batches: int = 0
    """Generation batches per training step before giving up with an error; 0 never gives up."""


@dataclass(kw_only=True)
class PFPPOConfig(BaseConfig):
    """Policy-filtered PPO (arXiv:2409.06957): draw the training batch again, by score."""

    reweight_method: str = option("pow", choices=("pow", "max_min", "max_random"))
    """How a score becomes a weight: its power, only the extremes, or mostly the best."""

    weight_pow: float = option(
        2.0,
        used_if=When(lambda here, run: here.reweight_method == "pow", "reweight_method is not pow"),
    )
    """Exponent of `pow`."""

    replay_size: int = option(
        0,
        minimum=0,
        used_if=When(
            lambda here, run: run.trainer.recipe == "pf_ppo",
            "only the recipe pf_ppo replays: recipe.pf_ppo.main_pf_ppo",
        ),
    )
    """Responses of earlier steps that are drawn from beside those of this one. They are of older
    policies, so `algorithm.rollout_correction` must choose a correction."""


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


@dataclass(kw_only=True)
class AlgoConfig(BaseConfig):
    """From rewards to advantages."""

    _target_: str = "verl.trainer.config.AlgoConfig"

    adv_estimator: str | None = "gae"
    """Advantage estimator: `gae` (needs a critic), `grpo`, `rloo`, `reinforce_plus_plus`, `remax`,
    `opo`, `gpg`, `gdpo`, `sppo`, ... or a registered name; null where the recipe makes pairs."""

    gamma: float = option(
        1.0,
        minimum=0,
        maximum=1,
        used_if=When(
            lambda here, run: discounts(here.adv_estimator),
            "this advantage estimator does not discount",
        ),
    )
    """Discount per token."""

    lam: float = option(
        1.0,
        minimum=0,
        maximum=1,
        used_if=(
            GAE,
            When(
                lambda here, run: here.lam_critic is None or here.lam_actor_alpha is None,
                "lam_critic and lam_actor_alpha are both set",
            ),
        ),
    )
    """GAE's trade between bias (0) and variance (1)."""

    lam_critic: float | None = option(None, minimum=0, maximum=1, used_if=GAE)
    """`lam` of the returns that the critic learns, where it differs from the policy's (VAPO,
    arXiv:2504.05118, has 1); null takes `lam`."""

    lam_actor_alpha: float | None = option(None, above=0, used_if=GAE)
    """Length-adaptive `lam` of the advantages (VAPO): 1 - 1 / (this * response tokens), at least 0;
    null takes `lam`."""

    norm_adv_by_std_in_grpo: bool = option(
        True,
        used_if=When(
            lambda here, run: (here.adv_estimator or "").startswith("grpo"),
            "only the GRPO estimators use it",
        ),
    )
    """Divide GRPO's advantages by the spread of the group; off is Dr.GRPO (arXiv:2503.20783)."""

    gdpo_reward_keys: list[str] = option(
        default_factory=list,
        used_if=When(
            lambda here, run: here.adv_estimator == "gdpo", "only adv_estimator=gdpo uses it"
        ),
    )
    """`gdpo`: numbers that the grader reports for each response, each normalised on its own."""

    gdpo_reward_weights: list[float] | None = option(
        None,
        used_if=When(
            lambda here, run: here.adv_estimator == "gdpo", "only adv_estimator=gdpo uses it"
        ),
    )
    """`gdpo`: weight of each of them in the sum; null weighs all by 1."""

    sppo_baseline: str = option(
        "mean",
        choices=("mean", "softmean", "batch_softmean"),
        used_if=When(
            lambda here, run: here.adv_estimator == "sppo", "only adv_estimator=sppo uses it"
        ),
    )
    """`sppo`: baseline of a reward: the mean over the prompt's responses, their soft mean, or the
    soft mean over the whole batch."""

    sppo_eta: float = option(
        1.0,
        yaml="${oc.select:actor_rollout_ref.actor.sppo_eta,1.0}",
        above=0,
        used_if=When(
            lambda here, run: here.adv_estimator == "sppo" and here.sppo_baseline != "mean",
            "only the soft means of adv_estimator=sppo use it",
        ),
    )
    """Sharpness of the soft means; follows `actor.sppo_eta`."""

    use_kl_in_reward: bool = False
    """Subtract the KL to the reference policy from each token's reward."""

    kl_penalty: str = option(
        "kl",
        choices=KL_TYPES,
        used_if=while_on("use_kl_in_reward"),
    )
    """Estimator of that KL. A trailing `+` takes its value with the gradient of `k2`."""

    kl_ctrl: KLControlConfig = option(
        default_factory=KLControlConfig,
        used_if=while_on("use_kl_in_reward"),
    )
    """The coefficient of that KL."""

    use_pf_ppo: bool = False
    """Draw the training batch again by score before the update. Only with `gae`."""

    pf_ppo: PFPPOConfig = option(default_factory=PFPPOConfig, used_if=while_on("use_pf_ppo"))
    """How that draw is weighted."""

    filter_groups: FilterGroupsConfig = option(
        default_factory=FilterGroupsConfig,
        used_if=When(lambda here, run: here.filter_groups.enable, "filter_groups.enable is off"),
    )
    """Dynamic sampling: drop prompts that teach nothing."""

    reward_gt_coef: float = option(5.0, used_if=PRIME)
    """PRIME: weight of the outcome, on the last token of a response."""

    reward_dpo_coef: float = option(5.0, used_if=PRIME)
    """PRIME: weight of the implicit model's token rewards."""

    prime_baseline: str = option(
        "leave_one_out", choices=("leave_one_out", "scaled"), used_if=PRIME
    )
    """PRIME: subtract the mean token reward of the group's other responses, as published, or scale
    token rewards by n/(n-1) and subtract the sum of all means over n-1, as verl does."""

    rollout_correction: RolloutCorrectionConfig = option(
        default_factory=RolloutCorrectionConfig.disabled
    )
    """Importance weights and rejection for responses of a slightly different policy."""


def _weigh(level: str, threshold: float) -> dict[str, Any]:
    return {"rollout_is": level, "rollout_is_threshold": threshold}


def _reject(criterion: str, threshold: Bound) -> dict[str, Any]:
    return {"rollout_rs": criterion, "rollout_rs_threshold": threshold}
