"""From what an agent loop returned to trajectories: the rows of one session.

A loop returns one output, several, or None. Several are rows of one session: a conversation that
forked, was compacted, or had helpers. They share one reward, which is on the last row, and count
as one sample wherever samples are counted (`verl.algos.sessions`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from verl.agent_loop.base import AgentLoopOutput, LoopResult
from verl.agent_loop.server_manager import SampledTurns
from verl.protocol import DataProto
from verl.protocol.padded import REQUEST_ROW, trajectories_of
from verl.protocol.trajectory import (
    Abstain,
    Group,
    InfraError,
    InfraFault,
    Segment,
    Trajectory,
    response_segments,
)
from verl.utils.environment import WentWrong
from verl.utils.media import Media
from verl.workers.rollout.base import TokenOutput


def fill_session(
    trajectory: Trajectory,
    result: LoopResult | InfraFault,
    turns: SampledTurns,
    max_response_tokens: int,
    tokenizer: Any,
) -> list[Trajectory]:
    """The rows that a loop made of `trajectory`, which is the last of them; none if it has nothing
    to train on, and then its grade says why.

    The last row has the reward and, for reward functions, the text of all rows. A row without a
    response teaches nothing and is left out, unless there is no other.
    """
    if isinstance(result, InfraFault):
        trajectory.grade = InfraError(str(result), kind=result.reason, is_final=True)
        return []
    outputs = [result] if isinstance(result, AgentLoopOutput) else list(result or ())
    if not outputs:
        trajectory.grade = Abstain("its agent loop returned nothing to train on")
        return []
    score = session_score(outputs)
    outputs = [output for output in outputs if output.response_ids] or outputs[-1:]
    rows = [*(replace(trajectory) for _ in outputs[1:]), trajectory]
    for number, (row, output) in enumerate(zip(rows, outputs, strict=True)):
        fill_trajectory(row, output, turns, max_response_tokens=max_response_tokens)
        row.reward_score = None
        row.rows_after = len(rows) - 1 - number
    trajectory.reward_score = score
    if len(rows) > 1:
        texts = tokenizer.batch_decode([row.response_ids for row in rows], skip_special_tokens=True)
        trajectory.extra_fields = {**trajectory.extra_fields, "session_responses": texts}
    return rows


def session_score(outputs: Sequence[AgentLoopOutput]) -> float | None:
    """The reward that a loop gave its session, on one row or on several."""
    scores = {output.reward_score for output in outputs if output.reward_score is not None}
    if len(scores) > 1:
        raise ValueError(
            f"an agent loop returned {len(outputs)} rows with the rewards "
            f"{[output.reward_score for output in outputs]}; the rows of a session share one "
            "reward: set reward_score on one of them, or the same on all"
        )
    return next(iter(scores), None)


def fill_from_batch(groups: Sequence[Group], batch: DataProto) -> None:
    """Take in what somebody else generated for the trajectories of these groups, in order.

    The column `request_row` says which of them a row belongs to, unless there is a row for each.
    """
    made = trajectories_of(batch)
    num_wanted = sum(len(group.trajectories) for group in groups)
    places = batch.non_tensor_batch.get(REQUEST_ROW, range(len(made)))
    if REQUEST_ROW not in batch.non_tensor_batch and len(made) != num_wanted:
        raise ValueError(
            f"{num_wanted} rows were to be continued and {len(made)} came back; where sessions "
            f"have several rows or none, the column {REQUEST_ROW!r} must say whose they are"
        )
    rows_of: dict[int, list[Trajectory]] = {}
    for place, row in zip(places, made, strict=True):
        rows_of.setdefault(int(place), []).append(row)
    num_before = 0
    for group in groups:
        asked, group.trajectories = group.trajectories, []
        for place, trajectory in enumerate(asked, num_before):
            found = rows_of.get(place, [])
            if not found:
                trajectory.grade = Abstain("nothing came back to train on")
                group.lost.append(trajectory)
            rows = [*(replace(trajectory) for _ in found[1:]), trajectory]
            for number, row in enumerate(found):
                rows[number].segments = row.segments
                rows[number].num_turns = row.num_turns
                rows[number].media = row.media
                rows[number].extra_fields = row.extra_fields
                rows[number].rows_after = len(found) - 1 - number
            group.trajectories += rows[: len(found)]
        num_before += len(asked)


def fill_trajectory(
    trajectory: Trajectory,
    output: AgentLoopOutput,
    turns: SampledTurns,
    *,
    max_response_tokens: int,
) -> None:
    """Take in what a loop returned, up to the limit; `turns` are what engines sampled for it."""
    ids, mask, log_probs = output.response_ids, output.response_mask, output.response_logprobs
    media, stop_reason = output.media, output.stop_reason
    routes = output.routed_experts
    if routes is None:
        routes = routes_of_turns([*output.prompt_ids, *ids], turns.outputs)
    if len(ids) > max_response_tokens:
        stop_reason = "length"
        num_kept = num_whole_tokens(media, len(output.prompt_ids) + max_response_tokens)
        max_response_tokens = num_kept - len(output.prompt_ids)
        media = [one for one in media if one.places[-1] < num_kept]
        ids, mask = ids[:max_response_tokens], mask[:max_response_tokens]
        log_probs = None if log_probs is None else log_probs[:max_response_tokens]
    trajectory.segments = [
        Segment(author="template", token_ids=output.prompt_ids),
        *response_segments(
            ids,
            mask,
            log_probs,
            [(turn.token_ids, turn.policy_versions) for turn in turns.outputs],
        ),
    ]
    trajectory.segments[-1].routed_experts = routes
    trajectory.media = tuple(media)
    trajectory.session_id = turns.session_id
    trajectory.reward_score = output.reward_score
    trajectory.num_turns = output.num_turns
    trajectory.stop_reason = stop_reason
    trajectory.metrics = output.metrics
    trajectory.extra_fields = output.extra_fields


def routes_of_turns(ids: list[int], outputs: Sequence[TokenOutput]) -> np.ndarray | None:
    """The expert routes of a row whose loop returned ids alone: those of the longest turn that was
    sampled in it. Routes are those of a turn's prompt and tokens but the last, so their number says
    where in the row its tokens must be."""
    longest = None
    for turn in outputs:
        routes = turn.routed_experts
        if routes is not None and (longest is None or len(routes) > len(longest)):
            end = len(routes) + 1
            if ids[end - len(turn.token_ids) : end] == turn.token_ids:
                longest = routes
    return longest


def num_whole_tokens(media: Sequence[Media], num_tokens: int) -> int:
    """At most so many tokens, and none of an image that would be cut."""
    for one in media:
        if one.places[0] < num_tokens <= one.places[-1]:
            return int(one.places[0])
    return num_tokens


def session_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """How sessions ended, what they lost, and what their tools answered."""
    ended = [t for group in groups for t in group.last_rows]
    num_rows = sum(len(group.trajectories) for group in groups)
    lost = [t.grade for group in groups for t in group.lost]
    faults = Counter(grade.kind for grade in lost if isinstance(grade, InfraError))
    metrics = {
        "rollout/truncated_ratio": sum(t.stop_reason == "length" for t in ended) / len(ended),
        "rollout/env_faults": float(faults.total()),
        "rollout/empty_sessions": float(len(lost) - faults.total()),
        "rollout/rows_per_session": num_rows / len(ended),
    }
    counted = {"rollout/env_faults": faults}
    for field in ("tool_outcomes", "fork_reasons"):
        found = [t.extra_fields[field] for t in ended if t.extra_fields.get(field) is not None]
        if found:
            counted[f"rollout/{field}"] = sum((Counter(each) for each in found), Counter())
    for name, counts in counted.items():
        metrics |= {f"{name}/{kind}": float(count) for kind, count in counts.items()}
    return metrics


class BrokenWorld(WentWrong, RuntimeError):
    """Too many trajectories ended in an `InfraFault`."""


def require_working_world(groups: Sequence[Group], max_infra_ratio: float) -> None:
    """Raise `BrokenWorld` if of the sessions of these groups more than that share was lost."""
    lost = [t.grade for group in groups for t in group.lost]
    faults = [grade for grade in lost if isinstance(grade, InfraError)]
    num_sessions = sum(len(group.last_rows) + len(group.lost) for group in groups)
    if num_sessions and not any(group.trajectories for group in groups):
        raise BrokenWorld(
            f"none of {num_sessions} trajectories has anything to train on; {len(faults)} ended in "
            f"a fault of their tools or environments: {lost[0]}"
        )
    if len(faults) > max_infra_ratio * num_sessions:
        kinds = Counter(fault.kind for fault in faults).most_common(5)
        raise BrokenWorld(
            f"{len(faults)} of {num_sessions} trajectories ended because their tools or "
            f"environments are broken ({', '.join(f'{kind} {n}' for kind, n in kinds)}), e.g. "
            f"{faults[0].reason}; what is left would be a biased sample. Repair them, or raise "
            f"rollout.multi_turn.max_infra_ratio, which is {max_infra_ratio}"
        )
