"""The algorithms under the path users import them from; the code is in `verl.algos`."""

# ruff: noqa: F401, F403
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
    get_adv_estimator_fn,
    get_policy_loss_fn,
    register_adv_est,
    register_policy_loss,
)

register_adv = register_adv_est
