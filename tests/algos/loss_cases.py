"""Options and batches for the tests of policy losses."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verl.algos.policy_losses import prepare_loss
from verl.algos.policy_losses.reinforce import bypassed_loss
from verl.algos.registry import get_policy_loss_fn
from verl.algos.rollout_correction.apply import choose_bypass_loss
from verl.config.actor import ActorConfig, PolicyLossConfig
from verl.config.algorithm import RolloutCorrectionConfig

CLIP_COV = {"clip_cov_ratio": 0.15, "clip_cov_lb": 0.02, "clip_cov_ub": 5.0}
KL_COV = {"kl_cov_ratio": 0.15, "ppo_kl_coef": 0.7}

# name of the case -> (loss_mode, its own options, rollout correction)
CASES: dict[str, tuple[str, dict[str, float], RolloutCorrectionConfig | None]] = {
    "vanilla": ("vanilla", {}, None),
    "gspo": ("gspo", {}, None),
    "sapo": ("sapo", {}, None),
    "gpg": ("gpg", {}, None),
    "clip_cov": ("clip_cov", CLIP_COV, None),
    "kl_cov": ("kl_cov", KL_COV, None),
    "geo_mean": ("geo_mean", {}, None),
    "cispo": ("cispo", {}, None),
    "dppo_tv": ("dppo_tv", {}, None),
    "dppo_kl": ("dppo_kl", {}, None),
    "dro": ("dro", {"dro_beta": 0.3}, None),
    "bypass ppo_clip": (
        "vanilla",
        {},
        RolloutCorrectionConfig.bypass_ppo_clip_k3_rs(0.05),
    ),
    "bypass gspo": ("gspo", {}, RolloutCorrectionConfig.bypass_ppo_clip()),
    "bypass geo_mean": ("geo_mean", {}, RolloutCorrectionConfig.bypass_ppo_clip()),
    "bypass geo_mean, rejected": (
        "geo_mean",
        {},
        replace(
            RolloutCorrectionConfig.bypass_ppo_clip(),
            rollout_rs="token_k1",
            rollout_rs_threshold="0.7_1.3",
        ),
    ),
    "bypass cispo": ("cispo", {}, RolloutCorrectionConfig.bypass_ppo_clip_geo_rs("0.7_1.3")),
    "bypass clip_cov": ("clip_cov", CLIP_COV, RolloutCorrectionConfig.bypass_ppo_clip()),
    "bypass reinforce, token": (
        "vanilla",
        {},
        RolloutCorrectionConfig.bypass_pg_geo_rs_token_tis(1.2, "0.7_1.3"),
    ),
    "bypass reinforce, sequence": ("vanilla", {}, RolloutCorrectionConfig.bypass_pg_is(1.5)),
}
OF_WHOLE_STEPS = {
    f"{case}, normalized": (mode, values, replace(correction, rollout_is_batch_normalize=True))
    for case, (mode, values, correction) in CASES.items()
    if case.startswith("bypass reinforce") and correction is not None
}
"""Their mean weight must be known, so they are refused where a step is several passes."""


def actor(case: str = "vanilla", **options: Any) -> ActorConfig:
    mode, loss_options, correction = {**CASES, **OF_WHOLE_STEPS}[case]
    policy_loss = PolicyLossConfig(loss_mode=mode, **loss_options)
    if correction is not None:
        choose_bypass_loss(correction, policy_loss)
    return ActorConfig(policy_loss=policy_loss, **options)


@dataclass(frozen=True)
class Batch:
    """The tensors of a policy loss, each (B, T)."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor

    def rows(self, index: Any) -> "Batch":
        return Batch(*(column[index] for column in vars(self).values()))

    def with_gradient(self) -> "Batch":
        return replace(self, log_prob=self.log_prob.detach().clone().requires_grad_())


def random_batch(
    num_rows: int = 9, num_tokens: int = 6, seed: int = 0, drift: float = 0.4
) -> Batch:
    """Double precision; ragged rows with holes in the mask; row 1 has no token at all."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(num_rows, num_tokens, generator=generator, dtype=torch.float64)

    old = -normal().abs() - 0.1
    lengths = torch.randint(1, num_tokens + 1, (num_rows, 1), generator=generator)
    mask = torch.arange(num_tokens) < lengths
    mask &= torch.rand(num_rows, num_tokens, generator=generator) > 0.15
    mask[1 % num_rows] = False
    return Batch(old, old + drift * normal(), normal(), mask.long())


def prepared(batch: Batch, config: ActorConfig) -> dict[str, Tensor]:
    """The columns that the loss of `config` needs of the whole batch."""
    return prepare_loss(
        bypassed_loss(config),
        old_log_prob=batch.old_log_prob,
        advantages=batch.advantages,
        response_mask=batch.response_mask,
        config=config,
    )


def loss_of(
    batch: Batch,
    config: ActorConfig,
    loss_agg_mode: str = "token-mean",
    rollout_is_weights: Tensor | None = None,
    **columns: Tensor,
) -> tuple[Tensor, dict[str, float]]:
    """Call the loss of `config` by the contract of custom losses."""
    return get_policy_loss_fn(config.policy_loss.loss_mode)(
        old_log_prob=batch.old_log_prob,
        log_prob=batch.log_prob,
        advantages=batch.advantages,
        response_mask=batch.response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
        rollout_is_weights=rollout_is_weights,
        **columns,
    )


def gradient_of(batch: Batch, config: ActorConfig, loss_agg_mode: str = "token-mean") -> Tensor:
    """The gradient of the loss with respect to `log_prob`, (B, T)."""
    batch = batch.with_gradient()
    loss, _ = loss_of(batch, config, loss_agg_mode)
    return torch.autograd.grad(loss, batch.log_prob)[0]
