"""Trajectories as the padded batch of the public surface.

Prompts are padded on the left, responses on the right; `B` rows, `P` prompt and `T` response tokens
at most, `L = P + T`. Masks come from lengths, never from pad ids: a pad token may also be the end
of a sentence. Arrays are allocated once and filled row by row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.protocol.data_proto import DataProto
from verl.protocol.trajectory import Segment, Trajectory, response_segments
from verl.utils.media import MEDIA, media_of, rope_positions
from verl.utils.model import compute_position_id_with_mask

REQUEST_ROW = "request_row"
"""The column that says which row of the prompts a row continues; it is there where that is not
simply the same one, because sessions have several rows or none."""

SESSION_UID = "session_uid"
"""The column that is equal for the rows of a session, which stand side by side; it is there where
some session has several rows. Without it every row is a session."""

SAMPLED_MASK = "sampled_mask"
"""The response mask as it was before tokens were rejected; only where some may have been."""

POLICY_VERSIONS = "policy_versions"
"""The column (B, T) of the policy version that sampled each token, -1 for tokens that no policy
sampled; it is there where somebody asks for it, as asynchronous training does. In a synchronous run
it would say one number B * T times."""


@dataclass(frozen=True, kw_only=True)
class Padding:
    """The widths of a batch and what fills them."""

    prompt_length: int
    response_length: int
    pad_token_id: int


def padded_batch(
    trajectories: Sequence[Trajectory],
    padding: Padding,
    *,
    with_rows: bool = True,
    with_versions: bool = False,
) -> DataProto:
    """One row per trajectory; longer responses are cut at the limit.

    With the columns of the dataset rows unless `with_rows` is false; a column that a trajectory
    brings itself comes first. `policy_versions` is there with `with_versions` only.
    """
    columns: dict[str, Any] = {}
    names = dict.fromkeys(name for t in trajectories for name in t.extra_fields)
    for name in names:
        columns[name] = [t.extra_fields.get(name) for t in trajectories]
    columns |= usual_fields(trajectories)
    if any(t.media for t in trajectories):
        columns[MEDIA] = plain_media(trajectories)
    if names:  # all of a row's extra fields, for reward functions
        columns["tool_extra_fields"] = [dict(t.extra_fields) for t in trajectories]
    if any(t.rows_after for t in trajectories):
        columns[SESSION_UID] = [t.session_uid for t in trajectories]
    columns["__num_turns__"] = np.array([t.num_turns for t in trajectories], dtype=np.int32)
    if with_rows:
        for name in trajectories[0].row:
            if name not in columns:
                columns[name] = [t.row[name] for t in trajectories]
    tensors = padded_columns(trajectories, padding)
    if with_versions:
        tensors[POLICY_VERSIONS] = padded_versions(trajectories, padding.response_length)
    for name, values in list(columns.items()):
        if isinstance(values, list) and all(isinstance(value, Tensor) for value in values):
            tensors.setdefault(name, torch.stack(columns.pop(name)))
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)


def usual_fields(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """Columns that every batch has, whatever its loops report: the scores of turns, the rewards of
    tools, the policy versions of the first and the last sampled token (they never go back), and
    anything else."""
    columns: dict[str, list[Any]] = {
        name: [t.extra_fields.get(name) or empty() for t in trajectories]
        for name, empty in (("turn_scores", list), ("tool_rewards", list), ("extras", dict))
    }
    for name, place in (("min_global_steps", 0), ("max_global_steps", -1)):
        columns[name] = []
        for trajectory in trajectories:
            sampled = [s.versions for s in trajectory.response if s.author == "model"]
            known = [versions for versions in sampled if versions]
            version = known[place][place] if known and len(known) == len(sampled) else None
            columns[name].append(trajectory.extra_fields.get(name, version))
    return columns


def padded_columns(trajectories: Sequence[Trajectory], padding: Padding) -> dict[str, Tensor]:
    """`prompts`, `responses`, `response_mask`, `input_ids`, `attention_mask`, `position_ids`, and
    `rollout_log_probs`, `routed_experts` and `rm_scores` where every trajectory has them; routes
    are not asked of one without trained tokens."""
    P, T = padding.prompt_length, padding.response_length
    ids = np.full((len(trajectories), P + T), padding.pad_token_id, dtype=np.int64)  # (B, L)
    is_token = np.zeros_like(ids)
    is_trained = np.zeros((len(trajectories), T), dtype=np.int64)
    log_probs = np.zeros((len(trajectories), T), dtype=np.float32)
    has_log_probs = True
    prompt_arrays: dict[int, np.ndarray] = {}  # samples of a prompt share its list of ids
    for row, trajectory in enumerate(trajectories):
        path = trajectory.path()
        prompt = trajectory.prompt_ids if trajectory.num_prompt_segments != 1 else path[0].token_ids
        if len(prompt) > P:
            raise ValueError(
                f"an agent loop returned a prompt of {len(prompt)} tokens; rollout.prompt_length "
                f"is {P}, and apply_chat_template keeps to it"
            )
        if id(prompt) not in prompt_arrays:
            prompt_arrays[id(prompt)] = np.array(prompt, dtype=np.int64)
        ids[row, P - len(prompt) : P] = prompt_arrays[id(prompt)]
        is_token[row, P - len(prompt) : P] = 1
        start = 0
        for segment in path[trajectory.num_prompt_segments :]:
            end = min(start + len(segment.token_ids), T)
            ids[row, P + start : P + end] = segment.token_ids[: end - start]
            is_trained[row, start:end] = segment.is_trained
            if segment.log_probs is not None:
                log_probs[row, start:end] = segment.log_probs[: end - start]
            elif segment.author == "model":
                has_log_probs = False
            start = end
        is_token[row, P : P + start] = 1
    input_ids, attention_mask = torch.from_numpy(ids), torch.from_numpy(is_token)
    columns = {
        "prompts": input_ids[:, :P].contiguous(),
        "responses": input_ids[:, P:].contiguous(),
        "response_mask": torch.from_numpy(is_trained),
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": padded_positions(trajectories, attention_mask),
    }
    if has_log_probs:
        columns["rollout_log_probs"] = torch.from_numpy(log_probs)
    routes = [t.segments[-1].routed_experts for t in trajectories]
    needed = [any(segment.is_trained for segment in t.response) for t in trajectories]
    if any(r is not None for r in routes) and all(
        r is not None for r, is_needed in zip(routes, needed, strict=True) if is_needed
    ):
        columns["routed_experts"] = padded_routes(trajectories, padding)
    scores = [0.0 if t.rows_after else t.reward_score for t in trajectories]
    if any(t.reward_score is not None for t in trajectories):
        columns["rm_scores"] = loop_scores(scores, attention_mask[:, P:])
    return columns


def padded_routes(trajectories: Sequence[Trajectory], padding: Padding) -> Tensor:
    """The experts of each token, (B, L, layers, k); the first k for tokens that have none: padding,
    the last token of a row, whose outputs nobody reads, and rows in which nothing is trained."""
    P, T = padding.prompt_length, padding.response_length
    parts = [t.segments[-1].routed_experts for t in trajectories]
    known = [part for part in parts if part is not None]
    largest = max((int(part.max()) for part in known if part.size), default=0)
    dtype = np.uint8 if largest < 256 else np.int16
    layers, k = known[0].shape[1:]
    routes = np.tile(np.arange(k, dtype=dtype), (len(parts), P + T, layers, 1))
    for row, (trajectory, part) in enumerate(zip(trajectories, parts, strict=True)):
        if part is None:
            continue
        start = P - len(trajectory.prompt_ids)
        count = min(len(part), P + T - start)
        routes[row, start : start + count] = part[:count]
    return torch.from_numpy(routes)


def padded_positions(trajectories: Sequence[Trajectory], attention_mask: Tensor) -> Tensor:
    """(B, L), or (B, 3, L) where some row has images with positions in three axes."""
    positions = compute_position_id_with_mask(attention_mask)
    if all(one.grid is None for t in trajectories for one in t.media):
        return positions
    positions = positions[:, None].repeat(1, 3, 1)
    for row, (trajectory, mask) in enumerate(zip(trajectories, attention_mask.bool(), strict=True)):
        found = rope_positions(int(mask.sum()), trajectory.media)
        if found is not None:
            positions[row][:, mask] = torch.from_numpy(found)
    return positions


def plain_media(trajectories: Sequence[Trajectory]) -> list[list[dict[str, Any]] | None]:
    """Images of rows as plain data, the same object for the same image."""
    plain: dict[int, dict[str, Any]] = {}
    return [
        [plain.setdefault(id(one), one.as_plain()) for one in t.media] or None for t in trajectories
    ]


def padded_versions(trajectories: Sequence[Trajectory], response_length: int) -> Tensor:
    """The policy version that sampled each response token, (B, T); -1 for other tokens."""
    versions = np.full((len(trajectories), response_length), -1, dtype=np.int64)
    for row, trajectory in enumerate(trajectories):
        start = 0
        for segment in trajectory.response:
            end = min(start + len(segment.token_ids), response_length)
            if segment.versions is not None:
                versions[row, start:end] = segment.versions[: end - start]
            elif segment.author == "model" and segment.is_trained and end > start:
                raise ValueError(
                    f"response tokens {start} to {end} of {trajectory.session_uid} are the "
                    "model's, and nobody knows which policy version sampled them; asynchronous "
                    "training needs it of every trained token: an agent loop must return the "
                    "tokens of its turns as they were generated"
                )
            start = end
    return torch.from_numpy(versions)


def loop_scores(scores: Sequence[float | None], response_tokens: Tensor) -> Tensor:
    """The scores that loops gave their trajectories, each on the last token, (B, T)."""
    rewards = torch.zeros(response_tokens.shape)
    for row, (score, length) in enumerate(
        zip(scores, response_tokens.sum(1).tolist(), strict=True)
    ):
        if score is None:
            num_scored = sum(score is not None for score in scores)
            raise ValueError(
                f"agent loops have scored {num_scored} of {len(scores)} trajectories; either all "
                "loops of a batch set reward_score or none does"
            )
        if length:
            rewards[row, length - 1] = float(score)
    return rewards


def trajectories_of(batch: DataProto) -> list[Trajectory]:
    """The trajectories of a padded batch that somebody else generated.

    Columns of the batch that a trajectory has no place for become its extra fields.
    """
    tensors = {name: batch.batch[name] for name in batch.batch.keys()}  # noqa: SIM118
    P = tensors["prompts"].shape[1]
    is_token = tensors["attention_mask"].bool()
    is_trained = tensors.get("response_mask", tensors["attention_mask"][:, P:]).tolist()
    log_probs = tensors["rollout_log_probs"].tolist() if "rollout_log_probs" in tensors else None
    own = {"prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids"}
    own |= {"rollout_log_probs", POLICY_VERSIONS}
    versions = tensors[POLICY_VERSIONS].tolist() if POLICY_VERSIONS in tensors else None
    turns = batch.non_tensor_batch.get("__num_turns__", np.zeros(len(batch), dtype=np.int32))
    media: Any = batch.non_tensor_batch.get(MEDIA, [None] * len(batch))
    found: list[Trajectory] = []
    for row in range(len(batch)):
        extras = {name: tensors[name][row] for name in tensors.keys() - own}
        extras |= {
            name: column[row]
            for name, column in batch.non_tensor_batch.items()
            if name not in ("__num_turns__", "tool_extra_fields", SESSION_UID, REQUEST_ROW, MEDIA)
        }
        response = tensors["responses"][row][is_token[row, P:]].tolist()
        segments = response_segments(
            response,
            is_trained[row][: len(response)],
            None if log_probs is None else log_probs[row][: len(response)],
        )
        if versions is not None:
            start = 0
            for segment in segments:
                end = start + len(segment.token_ids)
                segment.versions = versions[row][start:end] if segment.is_trained else None
                start = end
        found.append(
            Trajectory(
                uid="",
                sample=0,
                row={},
                segments=[
                    Segment(
                        author="template",
                        token_ids=tensors["prompts"][row][is_token[row, :P]].tolist(),
                    ),
                    *segments,
                ],
                num_turns=int(turns[row]),
                media=media_of(media[row]),
                extra_fields=extras,
            )
        )
    return found
