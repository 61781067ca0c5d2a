"""PPO that draws its batch by score from this step's responses and those of earlier ones.

    rollout -> score -> annotate                  -> assign_credit                 -> update
                        + `replay_size` responses    draws as many as were sampled
                        of earlier steps             in this step, by score

A response is kept as it was sampled and graded: tokens, scores, the log-probs of the policy that
sampled it and that policy's version. Values and old log-probs are computed anew each time it takes
part. What it is worth for the policy of today is the matter of a correction
(`verl.config.correction`), which such a run must choose as an asynchronous one must.
"""

from typing import Any

import numpy as np

from verl.agent_loop.buffer import Buffer, BufferPolicy
from verl.algos.sessions import session_numbers
from verl.protocol import DataProto
from verl.protocol.padded import POLICY_VERSIONS, SESSION_UID, padded_versions
from verl.trainer.ppo.context import StepContext, object_array
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.task_runner import TaskRunner

NUM_SAMPLED = "num_sampled_responses"


class ReplayBuffer(Buffer):
    """A buffer that remembers the last graded rows; a checkpoint has them."""

    def __init__(self, policy: BufferPolicy, size: int) -> None:
        super().__init__(policy)
        self.size = size
        self.rows: DataProto | None = None

    def keep(self, batch: DataProto) -> None:
        """Remember these rows, and forget the oldest beyond the size; sessions stay whole."""
        rows = DataProto(batch=batch.batch.clone(), non_tensor_batch=dict(batch.non_tensor_batch))
        if self.rows is not None:
            rows = joined(self.rows, rows)
        numbers = session_numbers(rows)
        sessions = np.arange(len(rows)) if numbers is None else numbers.numpy()
        newest = list(dict.fromkeys(sessions[::-1].tolist()))[: self.size]
        self.rows = rows.select_idxs(np.flatnonzero(np.isin(sessions, newest)))

    def state_dict(self) -> dict[str, Any]:
        rows = self.rows
        replay = None
        if rows is not None:
            columns = {
                name: list(column) if column.dtype == object else column
                for name, column in rows.non_tensor_batch.items()
            }
            replay = {"tensors": dict(rows.batch.items()), "columns": columns}
        return {**super().state_dict(), "replay": replay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        replay = state.pop("replay")
        super().load_state_dict(state)
        if replay is not None:
            columns = {
                name: object_array(column) if isinstance(column, list) else column
                for name, column in replay["columns"].items()
            }
            self.rows = DataProto.from_dict(tensors=replay["tensors"], non_tensors=columns)


class ReplayTrainer(PPOTrainer):
    """Adds responses of earlier steps to those that PF-PPO draws from."""

    buffer: ReplayBuffer

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.buffer = ReplayBuffer(self.buffer.policy, self.config.algorithm.pf_ppo.replay_size)

    def rollout(self, step: StepContext) -> DataProto:
        """As ever, with the policy version of each token."""
        batch = super().rollout(step)
        rows = [trajectory for group in step.groups for trajectory in group.trajectories]
        versions = padded_versions(rows, self.padding.response_length)
        batch.batch[POLICY_VERSIONS] = versions
        return batch

    def annotate(self, batch: DataProto, step: StepContext) -> DataProto:
        """Beside what was sampled now, what is remembered; then remember what was sampled."""
        sampled, replayed = batch, self.buffer.rows
        if replayed is not None:
            batch = joined(sampled, replayed)
            batch.meta_info.pop("policy_version", None)  # there are several
        batch.meta_info[NUM_SAMPLED] = num_responses(sampled)
        self.buffer.keep(sampled)
        return super().annotate(batch, step)

    def assign_credit(self, batch: DataProto, step: StepContext) -> DataProto:
        """PF-PPO draws with replacement, so the first of its draws are a batch of any size."""
        num_sampled = batch.meta_info.pop(NUM_SAMPLED)
        drawn = super().assign_credit(batch, step)
        names = drawn.non_tensor_batch.get(SESSION_UID, np.arange(len(drawn)))
        chosen = list(dict.fromkeys(names.tolist()))[:num_sampled]
        drawn = drawn.select_idxs(np.flatnonzero(np.isin(names, chosen)))
        drawn.meta_info["global_token_num"] = drawn.batch["attention_mask"].sum(-1).tolist()
        uids = {group.uid for group in step.groups}
        is_old = [uid not in uids for uid in drawn.non_tensor_batch["uid"]]
        step.report.add("training/replayed_ratio", float(np.mean(is_old)))
        return drawn


def joined(*parts: DataProto) -> DataProto:
    """The rows of parts whose loops and graders need not have reported the same columns."""
    names = list(dict.fromkeys(name for part in parts for name in part.non_tensor_batch))
    whole = []
    for part in parts:
        columns = dict(part.non_tensor_batch)
        for name in names:
            if name not in columns:
                columns[name] = np.full(len(part), None, dtype=object)
                if name == SESSION_UID:  # every row is one
                    uids = part.non_tensor_batch["uid"]
                    columns[name] = object_array(f"{uid}/{row}" for row, uid in enumerate(uids))
        whole.append(
            DataProto(batch=part.batch, non_tensor_batch=columns, meta_info=part.meta_info)
        )
    return DataProto.concat(whole)


def num_responses(batch: DataProto) -> int:
    numbers = session_numbers(batch)
    return len(batch) if numbers is None else int(numbers.max()) + 1


class PFPPORunner(TaskRunner):
    """Runs PPO with a replay buffer."""

    trainer_class = ReplayTrainer
