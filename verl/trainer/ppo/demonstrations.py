"""Cross-entropy beside the policy gradient: demonstrations in an update, and tokens of tools.

    rows of the step       s0 s1 s2 s3 | s4 s5 s6 s7          sessions, by optimizer step; prompts
    with demonstrations    s0 s1 s2 s3 d0 | s4 s5 s6 s7 d1    where the loss compares responses

A demonstration is a row whose `response_mask` is 0 everywhere, so the policy gradient, the KL and
their counts do not see it, and whose `demonstration_weights` are the coefficient. Which ones a step
gets follows from its number and the run's seed, so a run that resumes needs no state for it.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algos.components import DEMONSTRATION_WEIGHTS, TOOL_TEXT_WEIGHTS
from verl.algos.policy_losses.sequences import couples_prompts
from verl.config.actor import ActorConfig
from verl.config.actor_parts import SFTReplayConfig
from verl.config.ppo import PPOConfig
from verl.config.sft import SFTDataConfig
from verl.protocol import DataProto
from verl.protocol.padded import SAMPLED_MASK, SESSION_UID
from verl.utils.dataset.sft_dataset import RowTooLong, SFTDataset
from verl.utils.model import compute_position_id_with_mask
from verl.utils.scramble import keyed_seed
from verl.workers.actor.teacher import PROMPT_MASK, PROMPTS, TEACHER_INDEX

OBJECTS = ("uid", SESSION_UID, "multi_modal_inputs")
"""Object columns that an update reads."""


class CrossEntropyRows:
    """What `actor.sft_replay` and `actor.ce_on_tool_text_coef` add to a batch."""

    def __init__(self, config: PPOConfig, tokenizer: Any, seed: int) -> None:
        self._actor: ActorConfig = config.actor_rollout_ref.actor
        self._seed = seed
        self._counts_prompts = couples_prompts(self._actor)
        self._units_per_step = self._actor.ppo_mini_batch_size
        if not self._counts_prompts:
            self._units_per_step *= config.actor_rollout_ref.rollout.n
        num_steps = -(-config.data.train_batch_size // self._actor.ppo_mini_batch_size)
        self._replay: SFTReplayConfig = self._actor.sft_replay
        self._rows_per_update = num_steps * self._replay.num_rows
        self._demonstrations: SFTDataset | None = None
        if self._replay.files is not None:
            self._demonstrations = demonstrations(config, self._replay, tokenizer)

    def add(self, batch: DataProto, step: int) -> DataProto:
        """What the actor trains on in a step; `batch` itself stays as it is."""
        tensors = dict(batch.batch.items())
        coefficient = self._actor.ce_on_tool_text_coef
        mask = tensors["response_mask"]
        if coefficient:
            is_text = tensors["attention_mask"][:, -mask.shape[1] :]
            sampled = tensors.get(SAMPLED_MASK, mask)  # a rejected token is no tool's
            tensors[TOOL_TEXT_WEIGHTS] = coefficient * (is_text * (sampled == 0)).float()
        if self._demonstrations is not None:
            tensors[DEMONSTRATION_WEIGHTS] = torch.zeros_like(mask, dtype=torch.float32)
        objects = {n: batch.non_tensor_batch[n] for n in OBJECTS if n in batch.non_tensor_batch}
        rows = DataProto.from_dict(tensors=tensors, non_tensors=objects)
        if self._demonstrations is not None:
            rows = self._interleaved(rows, step)
        rows.meta_info = batch.meta_info
        return rows

    def _interleaved(self, rows: DataProto, step: int) -> DataProto:
        """Demonstrations after the last session, or prompt, of every optimizer step."""
        counted = "uid" if self._counts_prompts else SESSION_UID
        labels = rows.non_tensor_batch.get(counted, np.arange(len(rows)))
        order, added, seen = [], 0, set()
        for row, label in enumerate(labels):
            if label not in seen and seen and len(seen) % self._units_per_step == 0:
                order += [len(rows) + added + i for i in range(self._replay.rows_per_mini_batch)]
                added += self._replay.rows_per_mini_batch
            seen.add(label)
            order.append(row)
        order += [len(rows) + added + i for i in range(self._replay.rows_per_mini_batch)]
        added += self._replay.rows_per_mini_batch
        first = (step - 1) * self._rows_per_update
        chosen = [self._index(first + place) for place in range(added)]
        return DataProto.concat([rows, self._rows(chosen, like=rows)]).select_idxs(order)

    def _index(self, place: int) -> int:
        """The demonstration at a place of the endless sequence of shuffled epochs."""
        assert self._demonstrations is not None
        size = len(self._demonstrations)
        seed = keyed_seed(self._seed, "sft_replay", place // size)
        return int(np.random.default_rng(seed).permutation(size)[place % size])

    def _rows(self, chosen: list[int], *, like: DataProto) -> DataProto:
        """Demonstrations with the columns of a batch; what they do not have is 0."""
        assert self._demonstrations is not None
        columns: dict[str, Tensor] = {
            name: column.new_zeros(len(chosen), *column.shape[1:])
            for name, column in like.batch.items()
        }
        width = columns["prompts"].shape[1]
        ids, mask = columns["input_ids"], columns["attention_mask"]
        for row, index in enumerate(chosen):
            prompt, response = map(torch.tensor, self._demonstrations.token_ids(index))
            tokens = slice(width - len(prompt), width + len(response))
            ids[row, tokens] = torch.cat([prompt, response])
            mask[row, tokens] = 1
            columns[DEMONSTRATION_WEIGHTS][row, : len(response)] = self._replay.coef
        columns["prompts"], columns["responses"] = ids[:, :width], ids[:, width:]
        positions = compute_position_id_with_mask(mask)
        own = columns["position_ids"]
        columns["position_ids"] = positions if own.dim() == 2 else positions[:, None].expand_as(own)
        if TEACHER_INDEX in columns:
            columns[TEACHER_INDEX].fill_(-1)
        if PROMPTS in columns:  # no teacher's answer counts, but a row needs a token to begin with
            columns[PROMPTS][:, -1], columns[PROMPT_MASK][:, -1] = ids[:, width - 1], 1
        labels = np.array([f"demonstration-{row}" for row in range(len(chosen))], dtype=object)
        objects = {
            name: np.full(len(chosen), None, dtype=object) if name == OBJECTS[2] else labels
            for name in like.non_tensor_batch
        }
        return DataProto.from_dict(tensors=columns, non_tensors=objects)


def components_of(config: PPOConfig, tokenizer: Any, seed: int) -> CrossEntropyRows | None:
    actor = config.actor_rollout_ref.actor
    is_asked = actor.sft_replay.files is not None or actor.ce_on_tool_text_coef > 0
    return CrossEntropyRows(config, tokenizer, seed) if is_asked else None


def demonstrations(config: PPOConfig, replay: SFTReplayConfig, tokenizer: Any) -> SFTDataset:
    """The rows of the files; each must fit into the widths of the batch."""
    assert replay.files is not None
    options = SFTDataConfig(
        prompt_key=replay.prompt_key,
        response_key=replay.response_key,
        apply_chat_template_kwargs=config.data.apply_chat_template_kwargs,
    )
    rows = SFTDataset(replay.files, tokenizer, options)
    limits = (
        ("prompt", config.actor_rollout_ref.rollout.prompt_length, "data.max_prompt_length"),
        ("response", config.actor_rollout_ref.rollout.response_length, "data.max_response_length"),
    )
    for index in range(len(rows)):
        for (part, limit, option), ids in zip(limits, rows.token_ids(index), strict=True):
            if len(ids) > limit:
                raise RowTooLong(
                    f"actor.sft_replay: {rows.rows.location(index)} has a {part} of {len(ids)} "
                    f"tokens, more than {option} ({limit}); raise it, or take the row out"
                )
    return rows
