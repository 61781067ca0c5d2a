"""What the estimators share: reading rewards, and laying advantages over tokens.

A reward is a number or it is an error: NaN and infinity are refused by row, because one of them in
a group or in a whitened batch would spread to every other row.
"""

import torch
from torch import Tensor

from verl.utils.torch_functional import masked_whiten


def require_finite(rewards: Tensor, name: str = "token_level_rewards") -> Tensor:
    """`rewards` (B, ...) unchanged; ValueError naming the rows that hold NaN or infinity."""
    is_bad = ~torch.isfinite(rewards.reshape(len(rewards), -1)).all(-1)
    if is_bad.any():
        rows = is_bad.nonzero().flatten().tolist()
        shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
        raise ValueError(
            f"{name} holds NaN or infinity in {len(rows)} of {len(rewards)} rows (row {shown}); "
            "a response without a score must be left out of the batch, together with its group"
        )
    return rewards


def outcome_reward(token_level_rewards: Tensor) -> Tensor:
    """One reward per response, (B,): the sum over its tokens, wherever on them it was paid."""
    total = require_finite(token_level_rewards).sum(-1)
    return total if total.is_floating_point() else total.float()


def spread_over_tokens(advantage: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Give every trained token of response i the advantage (B,) of i; the returns are the same."""
    per_token = torch.where(response_mask.bool(), advantage[:, None], 0.0)  # (B, T)
    return per_token, per_token


def reward_of_trained_tokens(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Move what was paid on a masked token (tool output) to the trained token before it, (B, T).

    That token is the action that led there. Without this, a score placed on the last token of a
    response that ends in tool output would be lost. What is paid before the first trained token is
    not owed to any action and is left out.
    """
    rewards = require_finite(token_level_rewards)
    position = torch.arange(rewards.shape[-1], device=rewards.device).expand_as(rewards)
    action = torch.where(response_mask.bool(), position, -1).cummax(-1).values  # last trained <= t
    owed = torch.where(action >= 0, rewards, 0.0)
    return torch.zeros_like(owed).scatter_add_(-1, action.clamp(min=0), owed)


def discounted_returns(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """R_t = r_t + gamma R_next, `next` being the next trained token; (B, T), 0 outside the mask.

    Returns cross masked tokens: a turn is credited with what later turns earn, and tool output is
    not discounted.
    """
    rewards = reward_of_trained_tokens(token_level_rewards, response_mask)
    if gamma == 1.0:
        returns = rewards.flip(-1).cumsum(-1).flip(-1)
        return torch.where(response_mask.bool(), returns, 0.0)
    is_trained = response_mask.bool().T  # (T, B): one row per step of the recursion
    rewards = rewards.T.contiguous()
    returns = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        following = torch.where(is_trained[t], rewards[t] + gamma * following, following)
        returns[t] = following
    return torch.where(is_trained, returns, 0.0).T.contiguous()


def whiten(values: Tensor, response_mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 over all trained tokens of the batch, 0 elsewhere.

    Equal values whiten to exactly 0: they are measured from one of them, so that no rounding of
    the mean is left to be blown up.
    """
    is_trained = response_mask.bool()
    if not is_trained.any():
        return torch.zeros_like(values)
    from_largest = values - values[is_trained].max()
    return torch.where(is_trained, masked_whiten(from_largest, is_trained), 0.0)
