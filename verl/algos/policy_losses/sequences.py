"""Losses on the log-ratio of whole sequences: DPO, SPPO and GVPO.

    h_s = sum_t log pi(y_t) - log pi_0(y_t)         over the trained tokens of session s
    L   = L(h_1, ..., h_S)                          over the sessions of the mini-batch

DPO compares two responses to a prompt, GVPO all of them, and they may be in different micro-batches
and on different ranks. L depends on the policy through h alone, so

    grad L = sum_s c_s sum_t grad log pi(y_t),      c_s = dL/dh_s

`prepare_sequences` computes L and the slopes c from all rows of an optimizer step and log-probs of
the policy at its start, without gradients; a micro-batch needs the slopes of its own rows only. L
is a mean over the pairs or sessions of the mini-batch, which is the only aggregation defined. A
session without a trained token says nothing about the policy and takes no part.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl.algos.policy_losses.terms import options
from verl.algos.registry import get_policy_loss_fn, register_policy_loss
from verl.config.actor import ActorConfig
from verl.utils.torch_functional import masked_sum

Shares = dict[str, Tensor]
"""(S,) per metric: what each session contributes to it; the metric is their sum."""

SequenceLoss = Callable[[Tensor, Tensor, Tensor, ActorConfig], tuple[Tensor, Shares]]
"""From h, the advantage and the prompt of each session, (S,) each, to the loss of each, (S,), whose
sum is L, and to metrics."""


def dpo_loss(
    log_ratio: Tensor, advantage: Tensor, prompt: Tensor, config: ActorConfig
) -> tuple[Tensor, Shares]:
    """Direct preference optimization (arXiv:2305.18290), on every pair of responses to a prompt of
    which one has a positive and the other a negative advantage.

        m = h_chosen - h_rejected
        sigmoid:  -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)     e = label smoothing
        ipo:      (m - 1 / (2 beta))^2                                      arXiv:2310.12036

    L is the mean over pairs. An advantage of 0 is in no pair.
    """
    is_pair = (advantage[:, None] > 0) & (advantage < 0) & (prompt[:, None] == prompt)  # (S, S)
    chosen, rejected = is_pair.nonzero(as_tuple=True)  # (N,), (N,)
    beta, count = config.dpo_beta, max(len(chosen), 1)
    margin = log_ratio[chosen] - log_ratio[rejected]
    if config.dpo_loss_type == "ipo":
        loss = (margin - 1 / (2 * beta)) ** 2
    else:
        smoothing = config.dpo_label_smoothing
        loss = -(1 - smoothing) * logsigmoid(beta * margin) - smoothing * logsigmoid(-beta * margin)

    def of_sessions(values: Tensor, *sessions: Tensor) -> Tensor:
        """Values of pairs, divided equally among some of their sessions."""
        shares = torch.zeros_like(log_ratio)
        for one in sessions:
            shares = shares.index_add(0, one, values.to(log_ratio.dtype) / len(sessions))
        return shares

    rewards = beta * log_ratio.detach()
    return of_sessions(loss / count, chosen, rejected), {
        "dpo_accuracy": of_sessions((margin > 0) / count, chosen),
        "dpo_margin": of_sessions(beta * margin.detach() / count, chosen),
        "dpo_chosen_reward": of_sessions(rewards[chosen] / count, chosen),
        "dpo_rejected_reward": of_sessions(rewards[rejected] / count, rejected),
        "dpo_num_pairs": of_sessions(torch.ones_like(margin), chosen),
    }


def sppo_loss(
    log_ratio: Tensor, advantage: Tensor, prompt: Tensor, config: ActorConfig
) -> tuple[Tensor, Shares]:
    """Self-play preference optimization (arXiv:2405.00675): L = mean_s (h_s - eta A_s)^2.

    h compares with the policy that sampled, A is the reward (or win rate) above its baseline.
    """
    return _squares(log_ratio - config.sppo_eta * advantage, log_ratio)


def gvpo_loss(
    log_ratio: Tensor, advantage: Tensor, prompt: Tensor, config: ActorConfig
) -> tuple[Tensor, Shares]:
    """Group variance policy optimization (arXiv:2504.19599).

        L = mean_s (beta (h_s - mean_g h) - (A_s - mean_g A))^2         g the session's prompt

    Centred within the prompt, so that the partition function of the optimal policy cancels.
    """
    beta = config.policy_loss.gvpo_beta
    return _squares(_centred(beta * log_ratio - advantage, prompt), log_ratio)


def _squares(residual: Tensor, log_ratio: Tensor) -> tuple[Tensor, Shares]:
    count = max(len(residual), 1)
    return residual**2 / count, {
        "sequence_residual": residual.detach().abs() / count,
        "sequence_log_ratio": log_ratio.detach() / count,
    }


def _centred(values: Tensor, prompt: Tensor) -> Tensor:
    """Minus the mean over the prompt, which has a gradient too."""
    _, group, counts = torch.unique(prompt, return_inverse=True, return_counts=True)
    sums = values.new_zeros(len(counts)).index_add(0, group, values)
    return values - (sums / counts)[group]


SEQUENCE_LOSSES: dict[str, SequenceLoss] = {
    "dpo": dpo_loss,
    "sppo": sppo_loss,
    "gvpo": gvpo_loss,
}
COUPLED = ("dpo", "gvpo")
"""Those whose slopes depend on the other responses to the prompt: a mini-batch has all of them."""


def compute_policy_loss_on_sequences(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    sequence_slope: Tensor | None = None,
    sequence_loss: Tensor | None = None,
    **shares: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """sum_i (share_i + c_i sum_t (log pi - sg(log pi))): of these rows the share of L, with the
    gradient of L. The columns, (B,) each, are those of `prepare_sequences`."""
    dp_size = options(config).global_batch_info.get("dp_size", 1)
    if sequence_slope is None or sequence_loss is None:
        raise ValueError(
            "this policy loss compares whole sequences and needs sequence_slope and sequence_loss, "
            "columns that verl.algos.policy_losses.sequences.prepare_sequences makes of all rows "
            "of an optimizer step"
        )
    if rollout_is_weights is not None:
        raise ValueError(
            "a policy loss on whole sequences has no importance weights; leave "
            "algorithm.rollout_correction.rollout_is at null"
        )
    tokens = torch.where(response_mask.bool(), log_prob, 0)
    change = (tokens - tokens.detach()).sum(-1)  # (B,), 0 with the gradient of log pi
    loss = (sequence_loss + sequence_slope * change).sum() * dp_size
    return loss, {f"actor/{name}": share.sum() for name, share in shares.items()}


for _name in SEQUENCE_LOSSES:
    register_policy_loss(_name, built_in=True)(compute_policy_loss_on_sequences)


def is_on_sequences(config: ActorConfig) -> bool:
    """Whether the loss needs the slopes of whole sequences; a user's own of the same name may
    not."""
    name = config.policy_loss.loss_mode
    is_ours = name in SEQUENCE_LOSSES
    return is_ours and get_policy_loss_fn(name) is compute_policy_loss_on_sequences


def couples_prompts(config: ActorConfig) -> bool:
    """Whether a mini-batch must have all responses to a prompt, or none."""
    return is_on_sequences(config) and config.policy_loss.loss_mode in COUPLED


def prepare_sequences(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    session_index: Tensor,
    prompt_index: Tensor,
    config: ActorConfig,
    ref_log_prob: Tensor | None = None,
) -> dict[str, Tensor]:
    """The columns, (B,) each, that the loss of `config` needs of all rows of an optimizer step.

    `log_prob` belongs to the policy at its start; log-probs, advantages and mask are (B, T), the
    session and the prompt of each row (B,). A session's share is divided among its rows.
    """
    name = config.policy_loss.loss_mode
    numbers, rows = torch.unique(session_index, return_inverse=True, return_counts=True)[1:]

    def of_sessions(values: Tensor) -> Tensor:
        return values.new_zeros(len(rows)).index_add(0, numbers, values)

    base = _base(name, old_log_prob, ref_log_prob, config)
    difference = torch.where(response_mask.bool(), log_prob.detach() - base, 0).double()
    tokens = of_sessions(response_mask.sum(-1))
    advantage = of_sessions(masked_sum(advantages.double(), response_mask, -1))
    prompt = torch.zeros_like(tokens).scatter(0, numbers, prompt_index.to(tokens.dtype))
    present = tokens > 0
    with torch.enable_grad():
        log_ratio = of_sessions(difference.sum(-1))[present].requires_grad_()
        losses, shares = SEQUENCE_LOSSES[name](
            log_ratio, (advantage / tokens.clamp(min=1))[present], prompt[present], config
        )
        (slopes,) = torch.autograd.grad(losses.sum(), log_ratio, allow_unused=True)

    def of_rows(values: Tensor | None) -> Tensor:
        whole = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        if values is not None:
            whole[present] = values.detach()
        return whole[numbers].to(log_prob.dtype)

    shared = {"sequence_loss": losses, **shares}
    divided = {name: of_rows(values) / rows[numbers] for name, values in shared.items()}
    return {"sequence_slope": of_rows(slopes), **divided}


def _base(
    name: str, old_log_prob: Tensor, ref_log_prob: Tensor | None, config: ActorConfig
) -> Tensor:
    """log pi_0 of each token: the old policy's, in DPO the reference's."""
    if name != "dpo":
        return old_log_prob
    if config.dpo_reference_free:
        return torch.zeros_like(old_log_prob)
    if ref_log_prob is None:
        raise ValueError(
            "the policy loss dpo compares with a reference, but the batch has no ref_log_prob; "
            "let the run have a reference policy, or set actor.dpo_reference_free=True"
        )
    return ref_log_prob
