"""SPIN (arXiv:2401.01335): DPO whose reference is the policy of some steps ago.

Every `trainer.ref_update_freq` steps the policy becomes the reference, so that each round plays
against the one before. With `data.chosen_key` the chosen answer is the dataset's and every response
of the policy is rejected, as in the paper; without, pairs are made by rewards, as in online DPO.
A reference that moves is saved with every checkpoint, which `SpinWorker` sees to.

Online DPO (arXiv:2402.04792): pairs from rewards, the DPO loss in place of a policy gradient.

    score -> pairs -> annotate -> assign_credit: +1 chosen, -1 rejected -> update

Of the responses to a prompt the one with the best reward is chosen and the one with the worst is
rejected; the others are dropped before anything is computed on them. The loss is
`verl.algos.policy_losses.sequences.dpo_loss`, its reference the policy that training started from.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algos.advantages.returns import spread_over_tokens
from verl.algos.components import COMPONENTS
from verl.algos.sessions import session_numbers, session_sums
from verl.config.trainer import CheckpointConfig
from verl.protocol import DataProto
from verl.protocol.padded import SESSION_UID
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.context import Report, StepContext
from verl.trainer.ppo.metric_utils import length_metrics, mean_max_min, sequence_lengths
from verl.trainer.ppo.session import Metrics
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.ppo.tripwires import require_finite
from verl.trainer.task_runner import TaskRunner
from verl.utils.checkpoint.background import Receipt
from verl.utils.checkpoint.fsdp_checkpoint_manager import (
    FSDPCheckpointManager,
    as_it_is,
    checkpoint_manager,
)
from verl.utils.checkpoint.hf_model import own_weights
from verl.utils.checkpoint.piece_files import rank_name
from verl.utils.checkpoint.pieces import local_tensor
from verl.utils.model import compute_position_id_with_mask
from verl.workers.roles.actor_rollout_ref import ActorRolloutRefWorker
from verl.workers.roles.worker import write_with_receipt

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


SAMPLED = ("rollout_log_probs", "rm_scores")
"""Columns of what a policy sampled, which an answer of the dataset lacks."""


class SpinTrainer(OnlineDPOTrainer):
    """Online DPO with a reference that follows the policy."""

    @property
    def moves_reference(self) -> bool:
        return self.use_reference_policy and self.config.trainer.ref_update_freq > 0

    def init_workers(self) -> None:
        """Beside the policy, a reference that changes is part of every checkpoint."""
        super().init_workers()
        if self.moves_reference:
            self.checkpoint_manager.roles["ref"] = ReferenceFiles(self.ref_policy_wg)

    def _create_dataloader(self, *arguments: Any, **options: Any) -> None:
        super()._create_dataloader(*arguments, **options)
        key = self.config.data.chosen_key
        columns = self.train_dataset[0].keys() if key is not None else ()
        if key is not None and key not in columns:
            raise ValueError(
                f"data.chosen_key is {key!r}, but the training rows have no such column; they "
                f"have: {', '.join(sorted(columns))}"
            )

    def pairs(self, batch: DataProto, step: StepContext) -> DataProto:
        """By rewards, or every response against the dataset's answer."""
        key = self.config.data.chosen_key
        if key is None:
            return super().pairs(batch, step)
        paired, counts = against_answers(batch, key, self.tokenizer)
        step.report.count(counts)
        return in_pairs(paired)

    def update(self, batch: DataProto, step: StepContext) -> DataProto:
        batch = super().update(batch, step)
        if self.moves_reference and step.step % self.config.trainer.ref_update_freq == 0:
            with step.report.timed("update_reference"):
                self.ref_policy_wg.update_reference()
        return batch


class SpinRunner(TaskRunner):
    trainer_class = SpinTrainer

    def add_actor_rollout_worker(self, config: Any) -> tuple[type, Any]:
        """The policy's worker, which can make the policy its reference."""
        usual, group_class = super().add_actor_rollout_worker(config)
        for role, worker_class in self.role_worker_mapping.items():
            if worker_class is usual:
                self.role_worker_mapping[role] = SpinWorker
        return SpinWorker, group_class


@dataclass(frozen=True)
class ReferenceFiles:
    """The reference as a role of a checkpoint: it has a folder, and the policy's worker group."""

    group: Any

    def save_checkpoint(self, local_path: str, global_step: int) -> Any:
        return self.group.save_reference(local_path)

    def load_checkpoint(self, local_path: str) -> None:
        self.group.load_reference(local_path)

    def rank_check(self, method: str, timeout_seconds: float) -> Callable[[], None]:
        return self.group.rank_check(method, timeout_seconds)


def against_answers(
    batch: DataProto, key: str, tokenizer: Any
) -> tuple[DataProto, dict[str, float]]:
    """The responses as rejected, and a row per prompt with the answer in column `key` as chosen.

    An answer longer than a response may be gives no pair; a response that is the answer word for
    word gives none either. Both are counted.
    """
    batch = batch.select_idxs(np.arange(len(batch)))
    for name in SAMPLED:
        if name in batch.batch.keys():  # noqa: SIM118 (a TensorDict)
            batch.batch.pop(name)
    batch.meta_info.pop("policy_version", None)  # answers are of no policy
    prompts = batch.non_tensor_batch["uid"].astype(str)
    labels, first, group = np.unique(prompts, return_index=True, return_inverse=True)
    texts = batch.non_tensor_batch[key][first]
    answers = [answer_tokens(text, key, tokenizer) for text in texts]
    longest = batch.batch["responses"].shape[1]
    fits = np.array([len(answer) <= longest for answer in answers])
    sessions = numbers_of(batch).numpy()
    is_whole = np.bincount(sessions)[sessions] == 1  # a session of several rows is no one answer
    repeats = [tokens_of_response(batch, row) == answers[group[row]] for row in range(len(batch))]
    is_same = np.array(repeats) & is_whole
    is_rejected = fits[group] & ~is_same
    batch.batch[PREFERENCE] = -torch.from_numpy(is_rejected).float()
    has_pair = np.bincount(group, weights=is_rejected) > 0
    counts = {
        "preference/num_pairs": float(len(np.unique(sessions[is_rejected]))),
        "preference/num_same_as_answer": float(is_same.sum()),
        "preference/num_answers_too_long": float((~fits).sum()),
    }
    if not has_pair.any():
        return batch, counts
    chosen = batch.select_idxs(first[has_pair])
    write_responses(chosen, [a for a, has in zip(answers, has_pair, strict=True) if has])
    if SESSION_UID in chosen.non_tensor_batch:
        names = [f"answer of {label}" for label in labels[has_pair]]
        chosen.non_tensor_batch[SESSION_UID] = np.array(names, dtype=object)
    return DataProto.concat([batch, chosen]), counts


def answer_tokens(text: Any, key: str, tokenizer: Any) -> list[int]:
    if not isinstance(text, str) or not text:
        raise ValueError(
            f"data.chosen_key={key}: a row has {text!r}; it must be the text of an answer"
        )
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def tokens_of_response(batch: DataProto, row: int) -> list[int]:
    num_tokens = batch.batch["responses"].shape[1]
    is_token = batch.batch["attention_mask"][row, -num_tokens:].bool()
    return batch.batch["responses"][row][is_token].tolist()


def write_responses(batch: DataProto, answers: list[list[int]]) -> None:
    """Put other responses after the prompts of a batch; they have no score."""
    tensors = batch.batch
    if tensors["position_ids"].ndim != 2:
        raise ValueError(
            "data.chosen_key is for prompts of text; these have images or videos, whose positions "
            "an answer of the dataset cannot be given"
        )
    num_tokens = tensors["responses"].shape[1]
    for row, answer in enumerate(answers):
        tensors["responses"][row, : len(answer)] = torch.tensor(answer)
        tensors["response_mask"][row] = torch.arange(num_tokens) < len(answer)
    tensors["input_ids"][:, -num_tokens:] = tensors["responses"]
    tensors["attention_mask"][:, -num_tokens:] = tensors["response_mask"]
    tensors["position_ids"] = compute_position_id_with_mask(tensors["attention_mask"])
    for name in ("token_level_scores", *COMPONENTS):
        if name in tensors.keys():  # noqa: SIM118 (a TensorDict)
            tensors[name] = torch.zeros_like(tensors[name])
    tensors[PREFERENCE] = torch.ones(len(batch))


class SpinWorker(ActorRolloutRefWorker):
    """Actor, rollout, and a reference whose weights change."""

    reference_files: FSDPCheckpointManager

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        if self.is_ref:
            self.reference_files = checkpoint_manager(
                self.reference.engine.module,
                None,
                processing_class=self.tokenizer,
                checkpoint_config=CheckpointConfig(
                    save_contents=["model"], load_contents=["model"]
                ),
                rank=self.rank,
                world_size=self.world_size,
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @torch.no_grad()
    def update_reference(self) -> None:
        """Copy the policy's weights into the reference, each rank what it holds."""
        trained, kept = own_weights(self.engine.module), own_weights(self.reference.engine.module)
        for name, weight in kept.items():
            target, source = local_tensor(weight), local_tensor(trained[name])
            if target.shape != source.shape:
                raise ValueError(
                    f"{name} has {tuple(source.shape)} in the policy and {tuple(target.shape)} in "
                    "the reference on this rank; let actor_rollout_ref.ref.fsdp_config spread the "
                    "model as the actor's does"
                )
            target.copy_(source)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_reference(self, local_path: str) -> str:
        """Write the reference's weights; the receipt says when they are there, or why not."""
        folder = Path(local_path)
        receipt = Receipt(folder / rank_name("receipt", self.rank, self.world_size))
        write_with_receipt(self.reference_files.capture(as_it_is), folder, receipt)
        return str(receipt.path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_reference(self, local_path: str) -> None:
        """Continue with the reference of a folder that the caller has verified."""
        self.reference_files.load_checkpoint(local_path)
