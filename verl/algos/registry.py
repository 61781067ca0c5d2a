"""The two tables a user extends with algorithms: advantage estimators and policy losses.

    @register_adv_est("my_estimator")          then  algorithm.adv_estimator=my_estimator
    @register_policy_loss("my_loss")           then  actor.policy_loss.loss_mode=my_loss

A user's function may take the name of a built-in one and then replaces it; two different user
functions under one name are a ValueError. The functions themselves live in `verl.algos.advantages`
and `verl.algos.policy_losses`; importing any module of `verl.algos` loads both.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

from torch import Tensor

from verl.utils.registry import Registry

AdvantageFn = Callable[..., tuple[Tensor, Tensor]]
"""Called with keywords, see `verl.trainer.ppo.credit.compute_advantage`: (advantages, returns)."""

PolicyLossFn = Callable[..., tuple[Tensor, dict[str, Any]]]
"""Called with the keywords old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config
and rollout_is_weights; returns a scalar loss and metrics."""

OLDER_METRICS = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
"""What functions that return four numbers report beside the loss, in this order."""

Function = TypeVar("Function", bound=Callable[..., Any])

ADV_ESTIMATOR_REGISTRY = Registry[AdvantageFn]("advantage estimator")
POLICY_LOSS_REGISTRY = Registry[PolicyLossFn]("policy loss")


class AdvantageEstimator(str, Enum):
    """The built-in estimators; wherever one is expected its plain name will do."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    RLOO_VECTORIZED = "rloo_vectorized"
    GRPO_VECTORIZED = "grpo_vectorized"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"
    GDPO = "gdpo"
    SPPO = "sppo"


def register_adv_est(
    name_or_enum: str | AdvantageEstimator, *, built_in: bool = False
) -> Callable[[Function], Function]:
    """Decorator: make an advantage estimator available as `algorithm.adv_estimator`."""
    return ADV_ESTIMATOR_REGISTRY.register(plain_name(name_or_enum), built_in=built_in)


def get_adv_estimator_fn(name_or_enum: str | AdvantageEstimator) -> AdvantageFn:
    """The estimator of that name; ValueError lists the known ones."""
    return ADV_ESTIMATOR_REGISTRY[plain_name(name_or_enum)]


def register_policy_loss(name: str, *, built_in: bool = False) -> Callable[[Function], Function]:
    """Decorator: make a policy loss available as `actor.policy_loss.loss_mode`."""
    return POLICY_LOSS_REGISTRY.register(plain_name(name), built_in=built_in)


def loss_and_metrics(returned: Sequence[Any]) -> tuple[Tensor, Mapping[str, Any]]:
    """What a policy loss returns: `loss, metrics`, or the older four numbers."""
    if len(returned) == 4:
        return returned[0], dict(zip(OLDER_METRICS, returned[1:], strict=True))
    loss, metrics = returned
    return loss, metrics


def weights_argument(function: PolicyLossFn, weights: Tensor | None) -> dict[str, Tensor | None]:
    """`rollout_is_weights` as a keyword; a function of the older signature does without."""
    parameters = inspect.signature(function).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    if takes_any or "rollout_is_weights" in parameters:
        return {"rollout_is_weights": weights}
    if weights is not None:
        raise ValueError(
            f"the policy loss {function} has no parameter rollout_is_weights, which "
            "algorithm.rollout_correction.rollout_is fills; add it, or set rollout_is to null"
        )
    return {}


def get_policy_loss_fn(loss_name: str) -> PolicyLossFn:
    """The policy loss of that name (`clip-cov` finds `clip_cov`); ValueError lists the known."""
    name = plain_name(loss_name)
    underscored = name.replace("-", "_")
    if name not in POLICY_LOSS_REGISTRY and underscored in POLICY_LOSS_REGISTRY:
        name = underscored
    return POLICY_LOSS_REGISTRY[name]


def plain_name(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name
