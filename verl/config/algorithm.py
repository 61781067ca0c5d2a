"""How rewards become advantages, and how training corrects for a rollout that drifted from it.

Names of estimators are open: anything registered with `@register_adv_est` may be chosen. The
arithmetic is in `verl.algos`.
"""

from dataclasses import dataclass

from verl.config.base import BaseConfig, When, option, while_on
from verl.config.rollout_correction import RolloutCorrectionConfig

KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_TYPES = KL_ESTIMATORS + tuple(f"{name}+" for name in KL_ESTIMATORS)


def discounts(estimator: str) -> bool:
    return estimator in ("gae", "reinforce_plus_plus", "remax") or "optimal_token" in estimator


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


@dataclass(kw_only=True)
class AlgoConfig(BaseConfig):
    """From rewards to advantages."""

    _target_: str = "verl.trainer.config.AlgoConfig"

    adv_estimator: str = "gae"
    """Advantage estimator: `gae` (needs a critic), `grpo`, `rloo`, `reinforce_plus_plus`, `remax`,
    `opo`, `gpg`, ... or a registered name."""

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
        used_if=When(
            lambda here, run: here.adv_estimator == "gae", "only adv_estimator=gae uses it"
        ),
    )
    """GAE's trade between bias (0) and variance (1)."""

    norm_adv_by_std_in_grpo: bool = option(
        True,
        used_if=When(
            lambda here, run: here.adv_estimator.startswith("grpo"),
            "only the GRPO estimators use it",
        ),
    )
    """Divide GRPO's advantages by the spread of the group; off is Dr.GRPO (arXiv:2503.20783)."""

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

    rollout_correction: RolloutCorrectionConfig = option(
        default_factory=RolloutCorrectionConfig.disabled
    )
    """Importance weights and rejection for responses of a slightly different policy."""
