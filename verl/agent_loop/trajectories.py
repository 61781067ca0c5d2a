"""Trajectories become a batch, and their timings a report."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.agent_loop.base import AgentLoopOutput
from verl.protocol import DataProto
from verl.workers.rollout.sequences import pad_floats, padded_sequences


def as_batch(
    outputs: Sequence[AgentLoopOutput],
    *,
    prompt_length: int,
    response_length: int,
    pad_token_id: int,
) -> DataProto:
    """The batch that `generate_sequences` returns; longer responses are cut at the limit."""
    prompts = [output.prompt_ids for output in outputs]
    longest = max(map(len, prompts))
    if longest > prompt_length:
        raise ValueError(
            f"an agent loop returned a prompt of {longest} tokens; rollout.prompt_length is "
            f"{prompt_length}, and apply_chat_template keeps to it"
        )
    tensors = padded_sequences(
        prompts,
        [cut(output.response_ids, response_length) for output in outputs],
        [cut(output.response_mask, response_length) for output in outputs],
        prompt_length=prompt_length,
        response_length=response_length,
        pad_token_id=pad_token_id,
    )
    log_probs = [output.response_logprobs for output in outputs]
    if all(values is not None for values in log_probs):
        tensors["rollout_log_probs"] = pad_floats(log_probs, response_length)
    scores = [output.reward_score for output in outputs]
    if any(score is not None for score in scores):
        response_tokens = tensors["attention_mask"][:, prompt_length:]
        tensors["rm_scores"] = scores_on_last_tokens(scores, response_tokens)
    return DataProto.from_dict(tensors=tensors, non_tensors=object_columns(outputs))


def cut(row: list[int], length: int) -> list[int]:
    """No more than that many entries; a row that fits is not copied."""
    return row if len(row) <= length else row[:length]


def scores_on_last_tokens(scores: Sequence[float | None], response_tokens: Tensor) -> Tensor:
    """Each trajectory's own score on its last token, (B, T)."""
    num_scored = sum(score is not None for score in scores)
    if num_scored < len(scores):
        raise ValueError(
            f"agent loops have scored {num_scored} of {len(scores)} trajectories; either all loops "
            "of a batch set reward_score or none does"
        )
    rewards = torch.zeros(response_tokens.shape)
    for row, (score, length) in enumerate(
        zip(scores, response_tokens.sum(1).tolist(), strict=True)
    ):
        if length:
            rewards[row, length - 1] = float(score or 0.0)
    return rewards


def object_columns(outputs: Sequence[AgentLoopOutput]) -> dict[str, Any]:
    """`__num_turns__`, and a column for each extra field; None where a loop has none.

    `tool_extra_fields` has all of a row's extra fields, for reward functions.
    """
    names = dict.fromkeys(name for output in outputs for name in output.extra_fields)
    columns: dict[str, Any] = {
        name: [output.extra_fields.get(name) for output in outputs] for name in names
    }
    if names:
        columns["tool_extra_fields"] = [dict(output.extra_fields) for output in outputs]
    columns["__num_turns__"] = np.array([output.num_turns for output in outputs], dtype=np.int32)
    return columns


def timing_of(outputs: Sequence[AgentLoopOutput]) -> dict[str, float]:
    """`agent_loop/...`: how long trajectories took, and what the slowest one was like."""
    timing: dict[str, float] = {}
    parts = {
        "generate_sequences": [output.metrics.generate_sequences for output in outputs],
        "tool_calls": [output.metrics.tool_calls for output in outputs],
        "num_preempted": [float(output.metrics.num_preempted) for output in outputs],
    }
    for name, values in parts.items():
        timing[f"agent_loop/{name}/min"] = min(values)
        timing[f"agent_loop/{name}/max"] = max(values)
        timing[f"agent_loop/{name}/mean"] = sum(values) / len(values)
    total = np.add(parts["generate_sequences"], parts["tool_calls"])
    slowest = outputs[int(total.argmax())]
    for name in parts:
        timing[f"agent_loop/slowest/{name}"] = parts[name][int(total.argmax())]
    timing["agent_loop/slowest/prompt_length"] = len(slowest.prompt_ids)
    timing["agent_loop/slowest/response_length"] = len(slowest.response_ids)
    return timing
