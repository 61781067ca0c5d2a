"""Which tokens of a mini-batch covary most with its advantages, and a draw among them.

The covariance of a token says how much a policy-gradient step on it lowers the entropy:

    cov_it = (A_it - mean A) (log pi_it - mean log pi)      means over all tokens of the mini-batch

Nothing here is random: lots are drawn from the data, so that a selection does not depend on the
order of the rows, on padding, or on any generator's state, and a resumed run makes the same one.
"""

import torch
from torch import Tensor

from verl.utils.scramble import scramble
from verl.utils.torch_functional import masked_sum

LARGEST = torch.iinfo(torch.int64).max


def token_covariance(log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """(B, T), in double precision; 0 outside the mask."""
    centred = [_centred(values.double(), response_mask) for values in (log_prob, advantages)]
    return centred[0] * centred[1]


def draw_tokens(candidates: Tensor, lots: Tensor, count: int) -> Tensor:
    """The `count` candidates (all, if fewer) with the smallest lots, as a mask (B, T)."""
    lots = torch.where(candidates, lots, LARGEST).flatten()
    chosen = lots.argsort(stable=True)[:count]
    return _as_mask(chosen, candidates) & candidates


def top_tokens(values: Tensor, lots: Tensor, response_mask: Tensor, count: int) -> Tensor:
    """The `count` tokens of largest value, as a mask (B, T); among equals the lots decide."""
    is_token = response_mask.bool()
    by_lot = lots.flatten().argsort(stable=True)
    values = torch.where(is_token, values, -torch.inf).flatten()
    chosen = by_lot[values[by_lot].argsort(descending=True, stable=True)][:count]
    return _as_mask(chosen, is_token) & is_token


def token_lots(log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """A pseudo-random integer per token, (B, T), that depends only on its sequence and its place.

    The log-probs of a sequence, bit by bit, are its fingerprint.
    """
    bits = torch.where(response_mask.bool(), log_prob, 0).double().view(torch.int64)
    place = scramble(torch.arange(1, bits.shape[-1] + 1, device=bits.device))  # (T,)
    fingerprint = (scramble(bits + place) * response_mask.long()).sum(-1, keepdim=True)  # (B, 1)
    return scramble(fingerprint + place)


def share_of_tokens(response_mask: Tensor, ratio: float) -> int:
    """How many tokens the fraction `ratio` of the batch is; at least one."""
    return max(1, int(ratio * int(response_mask.sum())))


def _centred(values: Tensor, mask: Tensor) -> Tensor:
    mean = masked_sum(values, mask) / mask.sum().clamp(min=1)
    return torch.where(mask.bool(), values - mean, 0)


def _as_mask(positions: Tensor, like: Tensor) -> Tensor:
    flat = torch.zeros(like.numel(), dtype=torch.bool, device=like.device)
    flat[positions] = True
    return flat.view_as(like)
