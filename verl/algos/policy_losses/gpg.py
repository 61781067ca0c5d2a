"""GPG: the plain policy gradient, with neither ratio nor clip."""

import torch
from torch import Tensor

from verl.algos.policy_losses.terms import aggregate
from verl.algos.registry import register_policy_loss
from verl.config.actor import ActorConfig


@register_policy_loss("gpg", built_in=True)
def compute_policy_loss_gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Group policy gradient (arXiv:2504.02546): L = -A log pi. `old_log_prob` is not used."""
    loss = -advantages * torch.where(response_mask.bool(), log_prob, 0)
    return aggregate(loss, response_mask, loss_agg_mode, config, rollout_is_weights), {}
