"""How far a student is from a teacher, per token, and the losses made of it (arXiv:2306.13649).

The student samples, the teacher tells what it would have said. Write p for the student, q for the
teacher and x for the sampled token; sums run over the vocabulary V, or over the K tokens that the
teacher finds likeliest.

    k1, k2, k3, abs         estimates from log p(x) - log q(x) alone       `verl.algos.kl`
    forward_kl_topk         sum_K q (log q - log p)
    reverse_kl_topk         sum_K p (log p - log q) + p' (log p' - log q'),  ' is all outside of K
    forward_kl_full         sum_V q (log q - log p)                        exact
    reverse_kl_full         sum_V p (log p - log q)                        exact
    jsd                     beta KL(q || m) + (1 - beta) KL(p || m),  m = beta q + (1 - beta) p

With G_v = dD / d log p_v, the gradient with respect to the student's logits z is
G_v - p_v sum_u G_u; the full modes use it in closed form. forward_kl_topk leaves out what is
outside of K, so its best student has the teacher's distribution within K and nothing outside; the
reverse sum without its rest would be least for a student at p = q / e, so there the rest counts as
one token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algos.kl import kl_penalty

SAMPLED = (
    "k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "kl+", "abs+", "k3+", "low_var_kl+",
)  # fmt: skip
TOP_K = ("forward_kl_topk", "reverse_kl_topk")
FULL = ("forward_kl_full", "reverse_kl_full", "jsd")
MIN_REST = 1e-6
"""Mass outside of the K tokens that counts as none."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A mode and its settings."""

    mode: str
    jsd_beta: float = 0.5
    """The teacher's share of the mixture; towards 0 jsd is forward KL, towards 1 reverse KL, both
    scaled down."""

    min_log_prob: float | None = None
    """Log-probabilities below it count as this; without gradient where they are the student's."""

    def floor(self, log_probs: Tensor) -> Tensor:
        floor = self.min_log_prob
        return log_probs if floor is None else log_probs.clamp_min(floor)

    def sampled(self, log_prob: Tensor, teacher_log_prob: Tensor) -> Tensor:
        """(B, T), the estimate from the sampled tokens; differentiable."""
        return kl_penalty(self.floor(log_prob), self.floor(teacher_log_prob), self.mode)

    def top_k(self, log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
        """(B, T) from (B, T, K): both models at the teacher's likeliest tokens; differentiable."""
        p, q = self.floor(log_probs), self.floor(teacher_log_probs)
        if self.mode == "forward_kl_topk":
            return (teacher_log_probs.exp() * (q - p)).sum(-1)
        rest_p, rest_q = (
            (1 - known.exp().sum(-1)).clamp_min(MIN_REST)
            for known in (log_probs, teacher_log_probs)
        )
        return (log_probs.exp() * (p - q)).sum(-1) + rest_p * (rest_p.log() - rest_q.log())

    def full(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """(rows,) D and (rows, V) G = dD / d log p, from all log-probabilities (rows, V)."""
        if self.mode == "jsd":
            return self._mixture(log_p, log_q)
        distance = self.floor(log_p) - self.floor(log_q)
        if self.mode == "forward_kl_full":
            gradient = -log_q.exp()
            value = (gradient * distance).sum(-1)
            return value, gradient if self.min_log_prob is None else gradient * self._above(log_p)
        p = log_p.exp()
        weighted = p * distance
        return weighted.sum(-1), weighted + (
            p if self.min_log_prob is None else p * self._above(log_p)
        )

    def _mixture(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """jsd, where no log-probability needs a floor: the mixture is nowhere far below either."""
        beta = torch.tensor(self.jsd_beta, dtype=log_p.dtype, device=log_p.device)
        log_m = torch.logaddexp(log_q + beta.log(), log_p + (1 - beta).log())
        of_student = (1 - beta) * log_p.exp() * (log_p - log_m)
        of_teacher = beta * log_q.exp() * (log_q - log_m)
        return (of_student + of_teacher).sum(-1), of_student

    def _above(self, log_p: Tensor) -> Tensor:
        assert self.min_log_prob is not None
        return (log_p > self.min_log_prob).to(log_p.dtype)


def logits_gradient(log_p: Tensor, gradient: Tensor) -> Tensor:
    """From G = dD / d log p to dD / dz for logits z, (rows, V)."""
    return gradient - log_p.exp() * gradient.sum(-1, keepdim=True)
