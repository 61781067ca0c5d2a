"""How far the policy has moved from the reference, per token, and how strongly that is punished.

Only the log-probability of the sampled token is known, so the divergence is estimated. Write
d = log pi(x) - log pi_ref(x) for a token x drawn from pi; then E[d] = KL(pi || pi_ref).

    name              value             in expectation               gradient when used in a loss
    k1, kl            d                 KL, unbiased                 none: E[grad log pi] = 0
    abs               |d|               an upper bound of KL         sign(d) grad log pi
    k2, mse           d^2 / 2           close to KL for small d      d grad log pi: that of KL
    k3, low_var_kl    e^-d + d - 1      KL, unbiased, never < 0      that of KL(pi_ref || pi)

A trailing "+" keeps the value of the estimator and takes the gradient of k2, which on tokens drawn
from pi is in expectation the gradient of KL(pi || pi_ref): `k3+` reports k3 and optimises the KL.
In the reward (no gradient) k1 is the unbiased choice. See http://joschu.net/blog/kl-approx.html and
arXiv:2512.21852. All expectations are over tokens drawn from pi. The estimate has no importance
weight, so over tokens of an older policy it is off by as much as the two policies differ.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from verl.config.algorithm import KLControlConfig

MAX_LOG_RATIO = 20.0  # e^20 is far beyond any useful ratio and still finite in every dtype we use
MAX_K3 = 10.0


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """The estimate named `kl_penalty` for each token, in the shape of `logprob`."""
    if not kl_penalty.endswith("+"):
        return kl_penalty_forward(logprob, ref_logprob, kl_penalty)
    value = kl_penalty_forward(logprob, ref_logprob, kl_penalty.removesuffix("+"))
    k2 = kl_penalty_forward(logprob, ref_logprob, "k2")
    return value.detach() + (k2 - k2.detach())


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """The estimators themselves. k3 sees d within +-20 and is cut at 10, so that it never overflows
    and one absurd token cannot dominate a batch; beyond these limits its gradient is 0."""
    d = logprob - ref_logprob
    if kl_penalty in ("kl", "k1"):
        return d
    if kl_penalty == "abs":
        return d.abs()
    if kl_penalty in ("mse", "k2"):
        return 0.5 * d.square()
    if kl_penalty in ("low_var_kl", "k3"):
        d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return (torch.exp(-d) + d - 1).clamp(-MAX_K3, MAX_K3)
    if kl_penalty == "full":
        raise NotImplementedError(
            "KL penalty 'full' needs the logits of the whole vocabulary, which are not kept; "
            "use k1, k2 or k3"
        )
    raise ValueError(
        f"unknown KL penalty {kl_penalty!r}; it must be one of: kl, k1, abs, mse, k2, low_var_kl, "
        'k3, each also with a trailing "+"'
    )


def compute_rewards(
    token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float
) -> Tensor:
    """Rewards (B, T) that charge each token its k1 estimate: score - kl_ratio * (old - ref)."""
    return token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)


class FixedKLController:
    """A penalty coefficient that stays what it is."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to do: the coefficient does not follow the measured KL."""


class AdaptiveKLController:
    """A penalty coefficient that steers the KL towards `target_kl` (arXiv:1909.08593, section 2.2).

    value *= 1 + clip(kl / target_kl - 1, -0.2, 0.2) * n_steps / horizon

    `n_steps` counts the sequences behind the measurement; `horizon` has the same unit.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        if horizon <= 0:
            raise ValueError(
                f"kl_ctrl.horizon is {horizon}; an adaptive controller needs it above 0"
            )
        if target_kl <= 0:
            raise ValueError(f"kl_ctrl.target_kl is {target_kl}; it must be above 0")
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        if not math.isfinite(current_kl):
            raise ValueError(f"the measured KL is {current_kl}; the coefficient cannot follow it")
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


KLController = FixedKLController | AdaptiveKLController


def get_kl_controller(kl_ctrl: "KLControlConfig") -> KLController:
    """The controller that `algorithm.kl_ctrl` describes."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_coef=kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(
            init_kl_coef=kl_ctrl.kl_coef, target_kl=kl_ctrl.target_kl, horizon=kl_ctrl.horizon
        )
    raise NotImplementedError(
        f"algorithm.kl_ctrl.type is {kl_ctrl.type!r}; it must be 'fixed' or 'adaptive'"
    )
