"""The entropy of the policy over the tokens it was trained on."""

from typing import TYPE_CHECKING

from torch import Tensor

from verl.algos.aggregate import GlobalBatch, agg_loss
from verl.utils.torch_functional import entropy_from_logits

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
