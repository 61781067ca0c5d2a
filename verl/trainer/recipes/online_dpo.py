"""Online DPO (arXiv:2402.04792): pairs from rewards, the DPO loss in place of a policy gradient.

    score -> pairs -> annotate -> assign_credit: +1 chosen, -1 rejected -> update

Of the responses to a prompt the one with the best reward is chosen and the one with the worst is
rejected; the others are dropped before anything is computed on them. The loss is
`verl.algos.policy_losses.sequences.dpo_loss`, its reference the policy that training started from.
"""

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from verl.algos.advantages.returns import spread_over_tokens
from verl.algos.sessions import session_numbers, session_sums
from verl.protocol import DataProto
from verl.trainer.ppo.context import Report, StepContext
from verl.trainer.ppo.metric_utils import length_metrics, mean_max_min, sequence_lengths
from verl.trainer.ppo.session import Metrics
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.ppo.tripwires import require_finite
from verl.trainer.task_runner import TaskRunner

PREFERENCE = "preference"
"""The column (B,): 1 chosen, -1 rejected, 0 for rows that are in no pair."""


class OnlineDPOTrainer(PPOTrainer):
    """Makes pairs of a prompt's responses and learns to prefer one to the other."""

    def annotate(self, batch: DataProto, step: StepContext) -> DataProto:
        """As in PPO, for the rows that are in a pair."""
        step.report.merge(all_responses(batch))
        return super().annotate(self.pairs(batch, step), step)

    def pairs(self, batch: DataProto, step: StepContext) -> DataProto:
        """The rows of chosen and rejected responses, with `preference`."""
        numbers = numbers_of(batch)
        rewards = session_sums(batch.batch["token_level_scores"].sum(-1), batch)
        preference = preferences(rewards.double().numpy(), prompts_of_sessions(batch))
        step.report.count(pair_counts(preference, prompts_of_sessions(batch)))
        batch.batch[PREFERENCE] = preference[numbers]
        return in_pairs(batch)

    def assign_credit(self, batch: DataProto, step: StepContext) -> DataProto:
        """`advantages` are preferences: their sign says which response is chosen."""
        tensors = batch.batch
        tensors["token_level_rewards"] = tensors["token_level_scores"]
        advantages, returns = spread_over_tokens(tensors[PREFERENCE], tensors["response_mask"])
        tensors["advantages"], tensors["returns"] = advantages, returns
        require_finite(batch, "token_level_rewards")
        return batch

    def _batch_metrics(self, batch: DataProto, report: Report) -> Metrics:
        """What is known of all responses is not replaced by what is known of pairs."""
        found = super()._batch_metrics(batch, report)
        return {name: value for name, value in found.items() if name not in report.metrics}


class OnlineDPORunner(TaskRunner):
    trainer_class = OnlineDPOTrainer


def preferences(rewards: np.ndarray, prompts: np.ndarray) -> Tensor:
    """(S,): 1 for the best response to each prompt, -1 for the worst, 0 for others and for prompts
    whose rewards are all equal. Among equals the first is taken."""
    preference = torch.zeros(len(rewards))
    members = defaultdict(list)
    for row, prompt in enumerate(prompts):
        members[prompt].append(row)
    for rows in members.values():
        best, worst = rows[rewards[rows].argmax()], rows[rewards[rows].argmin()]
        if rewards[best] > rewards[worst]:
            preference[best], preference[worst] = 1, -1
    return preference


def pair_counts(preference: Tensor, prompts: np.ndarray) -> dict[str, float]:
    """How many prompts gave a pair, and why the others gave none."""
    names = prompts.astype(str)
    _, group, sizes = np.unique(names, return_inverse=True, return_counts=True)
    has_pair = np.bincount(group, weights=preference.abs().numpy()) > 0
    return {
        "preference/num_pairs": float((preference < 0).sum()),
        "preference/num_prompts_tied": float((~has_pair & (sizes > 1)).sum()),
        "preference/num_prompts_alone": float((~has_pair & (sizes == 1)).sum()),
    }


def in_pairs(batch: DataProto) -> DataProto:
    """The rows with a preference. Without any the first prompt stays, and teaches nothing, so that
    the step is made and reported."""
    is_kept = batch.batch[PREFERENCE] != 0
    if not is_kept.any():
        prompts = batch.non_tensor_batch["uid"]
        is_kept = torch.from_numpy(prompts == prompts[0])
    return batch.select_idxs(is_kept)


def numbers_of(batch: DataProto) -> Tensor:
    """(B,) the session of each row."""
    numbers = session_numbers(batch)
    return torch.arange(len(batch)) if numbers is None else numbers


def prompts_of_sessions(batch: DataProto) -> np.ndarray:
    """(S,) the prompt of each session."""
    first = np.unique(numbers_of(batch).numpy(), return_index=True)[1]
    return batch.non_tensor_batch["uid"][first]


def all_responses(batch: DataProto) -> Metrics:
    """Scores and lengths of the responses, before any are dropped."""
    _, lengths = sequence_lengths(batch)
    counts = session_sums(lengths, batch) > 0
    scores = session_sums(batch.batch["token_level_scores"].sum(-1), batch)[counts]
    return {
        **mean_max_min("critic/score", scores),
        **mean_max_min("critic/rewards", scores),
        **length_metrics("response_length", lengths, batch.batch["responses"].shape[-1]),
    }
