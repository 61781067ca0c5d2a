"""Rollout correction on a batch: once before the update, or left to the loss (bypass mode).

    decoupled   old_log_probs were computed by the trainer; the batch gets weights and a new mask
    bypass      old_log_probs := rollout_log_probs, which saves a forward pass; the loss
                `bypass_mode` compares the rollout policy with the current one

The functions see the whole batch, so its means are means of the batch; no other process is asked.
"""

from contextlib import nullcontext

from omegaconf import DictConfig, open_dict
from torch import Tensor

from verl.algos.rollout_correction.correction import correct_rollout
from verl.algos.sessions import JoinedSessions, session_numbers
from verl.config.actor_parts import PolicyLossConfig
from verl.config.algorithm import RolloutCorrectionConfig
from verl.protocol import DataProto
from verl.protocol.padded import SAMPLED_MASK


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: float = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: str | float | None = None,
) -> tuple[DataProto | None, Tensor, dict[str, float]]:
    """(`rollout_is_weights` as a DataProto, or None without `rollout_is`; the mask that is left;
    metrics named `rollout_corr/*`). All tensors are (B, T)."""
    weights, mask, metrics = correct_rollout(
        old_log_prob,
        rollout_log_prob,
        response_mask,
        rollout_is=rollout_is,
        rollout_is_threshold=rollout_is_threshold,
        rollout_is_batch_normalize=rollout_is_batch_normalize,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
    )
    if weights is None:
        return None, mask, metrics
    return DataProto.from_dict(tensors={"rollout_is_weights": weights}), mask, metrics


def compute_rollout_correction_and_add_to_batch(
    batch: DataProto, rollout_corr_config: RolloutCorrectionConfig
) -> tuple[DataProto, dict[str, float]]:
    """Decoupled mode: `rollout_is_weights` joins the batch, rejection replaces `response_mask`,
    which stays known as `sampled_mask`.

    Count the tokens and sequences of the batch after this: the rejected ones are no longer in it.
    A sequence is a session, with all of its rows.
    """
    names = ("old_log_probs", "rollout_log_probs", "response_mask")
    columns = {name: _column(batch, name) for name in names}
    numbers = session_numbers(batch)
    sessions = None if numbers is None else JoinedSessions(numbers, columns["response_mask"])
    if sessions is not None:
        columns = {name: sessions.join(column) for name, column in columns.items()}
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob=columns["old_log_probs"],
        rollout_log_prob=columns["rollout_log_probs"],
        response_mask=columns["response_mask"],
        rollout_is=rollout_corr_config.rollout_is,
        rollout_is_threshold=rollout_corr_config.rollout_is_threshold,
        rollout_is_batch_normalize=rollout_corr_config.rollout_is_batch_normalize,
        rollout_rs=rollout_corr_config.rollout_rs,
        rollout_rs_threshold=rollout_corr_config.rollout_rs_threshold,
    )
    if sessions is not None:
        mask = sessions.cut(mask)
        if weights is not None:
            found = sessions.cut(weights.batch["rollout_is_weights"])
            weights = DataProto.from_dict(tensors={"rollout_is_weights": found})
    if rollout_corr_config.rollout_rs is not None:
        batch.batch[SAMPLED_MASK] = batch.batch["response_mask"]
    batch.batch["response_mask"] = mask
    if weights is not None:
        batch = batch.union(weights)
    return batch, metrics


def apply_bypass_mode(
    batch: DataProto,
    rollout_corr_config: RolloutCorrectionConfig,
    policy_loss_config: PolicyLossConfig | DictConfig,
) -> None:
    """Bypass mode: take the rollout's log-probs for the old ones and choose the loss that knows."""
    batch.batch["old_log_probs"] = _column(batch, "rollout_log_probs")
    choose_bypass_loss(rollout_corr_config, policy_loss_config)


def choose_bypass_loss(
    correction: RolloutCorrectionConfig, policy_loss: PolicyLossConfig | DictConfig
) -> None:
    """The loss `bypass_mode` takes the place of the one that was chosen, and remembers its name."""
    is_untyped = isinstance(policy_loss, DictConfig)
    with open_dict(policy_loss) if is_untyped else nullcontext():
        policy_loss.rollout_correction = correction
        if policy_loss.loss_mode != "bypass_mode":
            policy_loss.bypassed_loss_mode = policy_loss.loss_mode
        policy_loss.loss_mode = "bypass_mode"


def _column(batch: DataProto, name: str) -> Tensor:
    if name in batch.batch.keys():  # noqa: SIM118
        return batch.batch[name]
    hint = "; set actor_rollout_ref.rollout.calculate_log_probs=True"
    raise ValueError(
        f"rollout correction needs the column {name!r}, which the batch does not have"
        f"{hint if name == 'rollout_log_probs' else ''}"
    )
