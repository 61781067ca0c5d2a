"""The critic's loss: squared error to the returns, with steps away from the old values clipped."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.algos.aggregate import GlobalBatch, agg_loss
from verl.utils.torch_functional import masked_mean

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
