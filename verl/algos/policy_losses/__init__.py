"""Policy losses: one family per file, all with the contract of `PolicyLossFn`.

Importing this package registers the built-in ones, so that `get_policy_loss_fn` finds them.
"""

from verl.algos.policy_losses.cov import compute_policy_loss_clip_cov, compute_policy_loss_kl_cov
from verl.algos.policy_losses.ppo import (
    compute_policy_loss,
    compute_policy_loss_cispo,
    compute_policy_loss_geo_mean,
    compute_policy_loss_gspo,
    compute_policy_loss_sapo,
    compute_policy_loss_vanilla,
)
from verl.algos.policy_losses.reinforce import (
    compute_policy_loss_bypass_mode,
    compute_policy_loss_gpg,
    compute_policy_loss_reinforce,
)
from verl.algos.policy_losses.sequences import compute_policy_loss_on_sequences
from verl.algos.policy_losses.terms import prepare_loss, prepared_by
from verl.algos.policy_losses.trust_region import (
    compute_policy_loss_dppo_kl,
    compute_policy_loss_dppo_tv,
    compute_policy_loss_dro,
)

__all__ = [
    "compute_policy_loss",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_on_sequences",
    "compute_policy_loss_reinforce",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "prepare_loss",
    "prepared_by",
]
