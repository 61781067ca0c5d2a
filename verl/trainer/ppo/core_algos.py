"""The algorithms under the path users import them from; the code is in `verl.algos`."""

# ruff: noqa: F401, F403
from collections.abc import Callable
from enum import Enum
from typing import Any

from verl.algos.advantages import *
from verl.algos.aggregate import LOSS_AGG_MODES, agg_loss, compute_entropy_loss, compute_value_loss
from verl.algos.kl import (
    AdaptiveKLController,
    FixedKLController,
    compute_rewards,
    get_kl_controller,
    kl_penalty,
    kl_penalty_forward,
)
from verl.algos.pf_ppo import compute_pf_ppo_reweight_data
from verl.algos.policy_losses import *
from verl.algos.registry import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    AdvantageEstimator,
    PolicyLossFn,
    get_policy_loss_fn,
    plain_name,
    register_policy_loss,
)
from verl.utils.registry import Registry


def register_adv_est(name_or_enum: str | Enum) -> Callable[[Any], Any]:
    """Decorator: add an estimator to what `ADV_ESTIMATOR_REGISTRY` of this module is by then."""
    name, table = plain_name(name_or_enum), ADV_ESTIMATOR_REGISTRY
    if isinstance(table, Registry):
        return table.register(name)

    def add(function: Any) -> Any:
        holder = table.setdefault(name, function)
        if holder is not function:
            raise ValueError(f"advantage estimator {name!r} is already registered as {holder}")
        return function

    return add


def get_adv_estimator_fn(name_or_enum: str | Enum) -> Any:
    """The estimator of that name in `ADV_ESTIMATOR_REGISTRY`, as this module has it by then."""
    name = plain_name(name_or_enum)
    if name not in ADV_ESTIMATOR_REGISTRY:
        known = ", ".join(sorted(ADV_ESTIMATOR_REGISTRY))
        raise ValueError(f"Unknown advantage estimator simply: {name}. Known: {known}")
    return ADV_ESTIMATOR_REGISTRY[name]


register_adv = register_adv_est
