"""What a policy is trained by beside the policy gradient: cross-entropy and KL, weighted by token.

    L = L_pg + sum_c sum_t w_ct (-log pi_t) / N_c + kl_loss_coef sum_t kl_t KL_t / N_kl

A batch may have columns of weights, (B, T): those of `CE_COMPONENTS` are w_c, `kl_weights` are
kl_t. N_c and N_kl are the tokens of the whole optimizer step, over all ranks, whose weight is not
0, so the components neither dilute each other nor depend on how the step is split. The policy
gradient counts the tokens of `response_mask`, whatever the weights are; without `kl_weights` so
does the KL (`actor.use_kl_loss`). Distillation beside rewards, demonstrations among the responses,
a term on what tools replied: all are weights.
"""

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.algos.sessions import session_numbers, session_sums
from verl.protocol import DataProto

CE_WEIGHTS, KL_WEIGHTS = "ce_weights", "kl_weights"
POSITIVE_WEIGHTS, DEMONSTRATION_WEIGHTS, TOOL_TEXT_WEIGHTS = (
    "positive_weights", "demonstration_weights", "tool_text_weights",
)  # fmt: skip
CE_COMPONENTS = (CE_WEIGHTS, POSITIVE_WEIGHTS, DEMONSTRATION_WEIGHTS, TOOL_TEXT_WEIGHTS)
"""Columns for cross-entropy that need not be there; the first is for recipes of users."""

COMPONENTS = (*CE_COMPONENTS, KL_WEIGHTS)


def component_tokens(rows: TensorDict | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """(B,) for each component that the rows have: their tokens with a weight in it."""
    present = [name for name in COMPONENTS if name in rows.keys()]  # noqa: SIM118 (a TensorDict)
    return {name: (rows[name] != 0).sum(-1) for name in present}


def weighted_mean(values: Tensor, weights: Tensor, num_tokens: int) -> Tensor:
    """sum_t w_t v_t / num_tokens; what has weight 0 has no influence, even if it is NaN."""
    return (values.masked_fill(weights == 0, 0) * weights).sum() / max(num_tokens, 1)


def positive_weights(batch: DataProto, coefficient: float, min_score: float) -> Tensor:
    """Weights of VAPO (arXiv:2504.05118): the coefficient on all trained tokens of responses whose
    `acc` (else score) is at least `min_score`, 0 on the others; (B, T)."""
    mask = batch.batch["response_mask"]
    score = batch.batch["token_level_scores"].sum(-1)  # (B,)
    if "acc" in batch.non_tensor_batch:  # None on rows of a session that were not graded
        reported = [float(value or 0) for value in batch.non_tensor_batch["acc"]]
        score = torch.tensor(reported, dtype=torch.float64, device=mask.device)
    score, numbers = session_sums(score, batch), session_numbers(batch)
    is_right = score >= min_score
    if numbers is not None:
        is_right = is_right[numbers.to(mask.device)]
    return coefficient * (mask * is_right[:, None]).float()
