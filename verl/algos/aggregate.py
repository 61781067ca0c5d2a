"""From a loss per token to one number, in a way that does not depend on how the batch is split.

A micro-batch contributes its local sum divided by a count of the *whole* batch, so that the losses
of micro-batches add up to the loss of the batch. Ranks whose gradients are averaged (FSDP, DDP)
multiply by the number of ranks, `dp_size`, which turns that average back into a sum. Whoever runs
a loss on a piece of a batch counts the batch first and passes the counts; without them the tensors
given here are taken to be the whole batch.

The losses that are little more than this are here too: the policy's entropy, and the critic's
squared error to the returns, clipped around the old values.
"""

from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from verl.utils.torch_functional import entropy_from_logits, masked_mean, masked_sum

if TYPE_CHECKING:
    from typing_extensions import Unpack


LOSS_AGG_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "token-sum",
)


class GlobalBatch(TypedDict, total=False):
    """What `agg_loss` must know of the whole batch; the keys are its keyword arguments."""

    dp_size: int
    batch_num_tokens: int | Tensor | None
    global_batch_size: int | Tensor | None
    loss_scale_factor: float | None
    sequence_tokens: Tensor | None


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | Tensor | None = None,
    global_batch_size: int | Tensor | None = None,
    loss_scale_factor: float | None = None,
    sequence_tokens: Tensor | None = None,
) -> Tensor:
    """Aggregate `loss_mat` (B, T) where `loss_mask` (B, T) is set: m is the mask, n_i = sum_t m_it.

        token-mean               sum_it l_it m_it              / batch_num_tokens  * dp_size
        seq-mean-token-sum       sum_i (sum_t l_it m_it)       / global_batch_size * dp_size
        seq-mean-token-mean      sum_i (sum_t l_it m_it / n_i) / global_batch_size * dp_size
        seq-mean-token-sum-norm  sum_it l_it m_it              / loss_scale_factor * dp_size
        token-sum                sum_it l_it m_it                                  * dp_size

    `batch_num_tokens` counts the kept tokens of the whole batch, `global_batch_size` its sequences
    with at least one kept token. Each defaults to the count in `loss_mask`; with `dp_size` above 1
    the one that the mode divides by must be given, since no rank sees the masks of the others.

    A sequence may be several rows (`verl.algos.sessions`), here, in other micro-batches or on other
    ranks. Then `sequence_tokens` (B,) are the kept tokens of the sequence of each row, which is n_i
    above, and `global_batch_size` counts sequences.

    The norm mode (Dr. GRPO, arXiv:2503.20783) divides by a constant, by default the padded length
    T, and not by the number of sequences; give `loss_scale_factor` where T may differ between the
    pieces of a batch. A mask without a kept token gives 0 with a zero gradient. What stands outside
    the mask has no influence, even if it is NaN.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        known = ", ".join(LOSS_AGG_MODES)
        raise ValueError(f"loss_agg_mode is {loss_agg_mode!r}; it must be one of: {known}")
    tokens = loss_mask.sum(-1)  # (B,) kept tokens of each sequence
    sums = masked_sum(loss_mat, loss_mask, -1)  # (B,)
    if loss_agg_mode == "token-sum":
        return sums.sum() * dp_size
    if loss_agg_mode == "token-mean":
        count = _global_count("batch_num_tokens", batch_num_tokens, tokens.sum(), dp_size)
        return sums.sum() / _nonzero(count) * dp_size
    if loss_agg_mode == "seq-mean-token-sum-norm":
        scale = loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
        return sums.sum() / scale * dp_size
    if sequence_tokens is None:
        sequence_tokens, num_sequences = tokens, (tokens > 0).sum()
    else:
        num_sequences = (tokens / _nonzero(sequence_tokens)).sum().round()
    count = _global_count("global_batch_size", global_batch_size, num_sequences, dp_size)
    if loss_agg_mode == "seq-mean-token-mean":
        sums = sums / _nonzero(sequence_tokens)
    return sums.sum() / _nonzero(count) * dp_size


def _global_count(
    name: str, given: int | Tensor | None, local: Tensor, dp_size: int
) -> int | Tensor:
    if given is not None:
        return given
    if dp_size != 1:
        raise ValueError(
            f"agg_loss with dp_size={dp_size} needs {name}, the count over all ranks: dividing by "
            f"the count of this rank would make the result {dp_size} times too large"
        )
    return local


def _nonzero(count: int | Tensor) -> int | Tensor:
    """`count`, or 1 where it is 0: an empty sum stays 0 instead of becoming NaN."""
    return count + (count == 0)


def compute_entropy_loss(
    logits: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    **global_batch: "Unpack[GlobalBatch]",
) -> Tensor:
    """Aggregate H(softmax(logits)) in nats; logits (B, T, V), mask (B, T).

    The bonus is subtracted from the loss: loss - entropy_coeff * entropy.
    """
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode, **global_batch)


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    **global_batch: "Unpack[GlobalBatch]",
) -> tuple[Tensor, Tensor]:
    """Clipped value loss and the share of tokens where the clip decides (arXiv:1707.06347).

        loss_t = 1/2 max((v_t - R_t)^2, (clip(v_t, V_t - c, V_t + c) - R_t)^2)

    v are the new predictions `vpreds`, V the `values` from before the update, R the `returns`, c is
    `cliprange_value`; all (B, T). `global_batch` goes to `agg_loss`.
    """
    clipped = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    loss, clipped_loss = (vpreds - returns).square(), (clipped - returns).square()
    total = agg_loss(torch.max(loss, clipped_loss), response_mask, loss_agg_mode, **global_batch)
    clip_fraction = masked_mean((clipped_loss > loss).float(), response_mask)
    return 0.5 * total, clip_fraction
