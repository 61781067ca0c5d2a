"""The ragged record of what was generated: segments, trajectories, groups.

A `Trajectory` is one sample of one prompt. It grows by whole segments, each written by one author,
and segments are never changed: a conversation that rewrites its history forks, so segments form a
tree in which a path from root to leaf is one row of training. `Group` holds all trajectories of one
prompt. Padded columns (`DataProto`) are made from these when somebody asks for them.

A grade is a score, no verdict, or a fault. The three stay different things: a fault of a grader
says nothing about the response, so it never becomes a reward.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from verl.utils.media import Media

Author = Literal["template", "user", "model", "tool"]


@dataclass(frozen=True)
class Score:
    """A verdict: a finite number, and whatever else the grader reported."""

    value: float
    extras: dict[str, Any] = field(default_factory=dict)
    token_values: np.ndarray | None = field(default=None, compare=False, repr=False)
    """Rewards of single response tokens, where the grader gives them; `value` is their sum."""


@dataclass(frozen=True)
class Abstain:
    """The grader cannot grade this response; it takes no part in training."""

    reason: str


@dataclass(frozen=True)
class InfraError:
    """Grading failed: an exception, a time-out, a result that is no score. Or there is nothing to
    grade, because an `InfraFault` ended the trajectory."""

    reason: str
    is_timeout: bool = False
    kind: str = "grading"
    """By which faults are counted: the `reason` of an `InfraFault`."""

    is_final: bool = False
    """It was retried already, so the group is not graded a second time."""


Grade = Score | Abstain | InfraError


class InfraFault(RuntimeError):
    """Raised by tools, interactions and environments: what the model talks to is broken.

    The policy cannot have caused it, so the trajectory gets no reward and takes no part in
    training. `reason` is a short word by which faults are counted.
    """

    def __init__(self, *args: object, reason: str = "other") -> None:
        super().__init__(*args)
        self.reason = reason


@dataclass(kw_only=True)
class Segment:
    """Consecutive tokens of one author; append-only."""

    author: Author
    token_ids: list[int]
    is_trained: bool = False
    log_probs: list[float] | None = None
    """Log-probs of model segments: one per token, under the weights that sampled it."""

    versions: list[int] | None = None
    """Policy versions of model segments: the one that sampled each token."""

    parent: int = -1
    """Index of the segment this one follows; -1 begins the conversation."""

    routed_experts: np.ndarray | None = None
    """(tokens, layers, k) the experts of all tokens of the path that ends with this segment, the
    last token perhaps left out; it is there on the last segment of a row, where they are recorded.
    """


@dataclass(kw_only=True)
class AgentLoopMetrics:
    """Where the time of one trajectory went."""

    generate_sequences: float = 0.0
    """Seconds of generation."""

    tool_calls: float = 0.0
    """Seconds in tools."""

    env_wait: float = 0.0
    """Seconds until an environment was free."""

    compute_score: float = 0.0
    """Seconds of grading, where the loop grades its trajectory itself."""

    num_preempted: int = -1
    """Times the engine computed its keys and values again; -1 if the engine does not tell."""


@dataclass(kw_only=True)
class Trajectory:
    """One sample of one prompt: a tree of segments, grade, timing.

    The first segments are the prompt. The last segment ends the conversation as it stands: the path
    that leads to it is the row that training sees. A session that becomes several rows is several
    trajectories with the same `uid` and `sample`, side by side; the last one is graded.
    """

    uid: str
    """Name of the prompt; equal for all samples of one prompt in one step."""

    sample: int
    """Number of this sample among those of its prompt; equal for the rows of a session."""

    rows_after: int = 0
    """Rows of the same session that follow; 0 for the last, on which the session's reward is."""

    row: Mapping[str, Any]
    """The columns of the dataset row."""

    segments: list[Segment] = field(default_factory=list)
    num_prompt_segments: int = 1
    media: tuple[Media, ...] = ()
    """Images of the row that training sees; their places are in prompt and response together."""

    seed: int | None = None
    session_id: str | None = None
    grade: Grade | None = None
    text: str | None = None
    """The response without special tokens, once somebody has decoded it."""

    reward_score: float | None = None
    """Set when the agent loop has scored the trajectory itself; then nobody else grades it."""

    stop_reason: str = ""
    num_turns: int = 0
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)

    @property
    def session_uid(self) -> str:
        """Name of the session; equal for its rows."""
        return f"{self.uid}/{self.sample}"

    def path(self, leaf: int = -1) -> list[Segment]:
        """The segments from the root to `leaf` (the last segment by default)."""
        index = leaf % len(self.segments) if self.segments else -1
        path: list[Segment] = []
        while index >= 0:
            path.append(self.segments[index])
            index = path[-1].parent
        return path[::-1]

    @property
    def prompt_ids(self) -> list[int]:
        return _joined(self.path()[: self.num_prompt_segments])

    @property
    def response(self) -> list[Segment]:
        """The segments after the prompt, replies of tools included."""
        return self.path()[self.num_prompt_segments :]

    @property
    def response_ids(self) -> list[int]:
        return _joined(self.response)

    @property
    def num_response_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.response)

    @property
    def response_mask(self) -> list[int]:
        """1 for the model's tokens that are trained, 0 for what others wrote."""
        return [int(s.is_trained) for s in self.response for _ in s.token_ids]

    @property
    def versions(self) -> set[int]:
        """Policy versions that sampled the response; empty where they are not known."""
        sampled = [s.versions for s in self.response if s.author == "model"]
        if any(versions is None for versions in sampled):
            return set()
        return {version for versions in sampled for version in versions or ()}


def _joined(segments: Sequence[Segment]) -> list[int]:
    """The ids of all segments; those of a single one are not copied."""
    if len(segments) == 1:
        return segments[0].token_ids
    return [token for segment in segments for token in segment.token_ids]


@dataclass(kw_only=True)
class Group:
    """All trajectories of one prompt; `index` in the data order is the admission key."""

    index: int
    uid: str
    drawn_at: int
    """The step whose prompts it was drawn with."""

    trajectories: list[Trajectory] = field(default_factory=list)
    lost: list[Trajectory] = field(default_factory=list)
    """Those with nothing to train on: the grade is an `InfraError` where what the model talks to
    broke, and `Abstain` where the loop returned nothing."""

    fault: str | None = None
    """Why the group cannot be trained on, where it cannot."""

    version: int | None = None
    """The policy version that sampled all of its tokens; None if several did, or none is known."""

    @property
    def last_rows(self) -> list[Trajectory]:
        """One trajectory of each session: the one that is graded."""
        return [t for t in self.trajectories if not t.rows_after]


def trajectory_timing(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`agent_loop/...`: how long sessions took, and what the slowest one was like.

    The rows of a session stand side by side; its times are their sums.
    """
    timing: dict[str, float] = {}
    sessions: list[list[Trajectory]] = []
    is_first = True
    for trajectory in trajectories:
        if is_first:
            sessions.append([])
        sessions[-1].append(trajectory)
        is_first = not trajectory.rows_after
    parts = {
        "generate_sequences": [sum(t.metrics.generate_sequences for t in s) for s in sessions],
        "tool_calls": [sum(t.metrics.tool_calls for t in s) for s in sessions],
        "compute_score": [sum(t.metrics.compute_score for t in s) for s in sessions],
        "num_preempted": [float(max(t.metrics.num_preempted for t in s)) for s in sessions],
    }
    if any(t.metrics.env_wait for t in trajectories):
        parts["env_wait"] = [t.metrics.env_wait for t in trajectories]
    for name, values in parts.items():
        timing[f"agent_loop/{name}/min"] = min(values)
        timing[f"agent_loop/{name}/max"] = max(values)
        timing[f"agent_loop/{name}/mean"] = sum(values) / len(values)
    total = np.add(parts["generate_sequences"], parts["tool_calls"])
    slowest = int(total.argmax())
    for name in parts:
        timing[f"agent_loop/slowest/{name}"] = parts[name][slowest]
    rows = sessions[slowest]
    timing["agent_loop/slowest/prompt_length"] = len(rows[-1].prompt_ids)
    timing["agent_loop/slowest/response_length"] = sum(t.num_response_tokens for t in rows)
    return timing


def response_segments(
    token_ids: list[int],
    mask: Sequence[int],
    log_probs: list[float] | None,
    sampled: Sequence[tuple[list[int], list[int]]] = (),
) -> list[Segment]:
    """Cut a response where `mask` changes: 1 is the model's, 0 a tool's or a user's.

    `sampled` are the turns that engines sampled, with the policy version of each token, in order;
    the model's segments get the versions of the turns that they consist of.
    """
    if all(mask):  # one turn of the model, which is the usual case: nothing is copied
        bounds = [0, len(token_ids)] if token_ids else [0]
    else:
        changes = [at for at in range(1, len(mask)) if bool(mask[at]) != bool(mask[at - 1])]
        bounds = [0, *changes, len(token_ids)]
    turns = iter(sampled)
    segments: list[Segment] = []
    for start, end in pairwise(bounds):
        is_whole = end - start == len(token_ids)
        ids = token_ids if is_whole else token_ids[start:end]
        is_model = bool(mask[start])
        segment = Segment(
            author="model" if is_model else "tool",
            token_ids=ids,
            is_trained=is_model,
            log_probs=log_probs if log_probs is None or is_whole else log_probs[start:end],
            versions=_versions_of(ids, turns) if is_model else None,
            parent=len(segments),  # the prompt comes before
        )
        segments.append(segment)
    return segments


def _versions_of(ids: list[int], turns: Iterator[tuple[list[int], list[int]]]) -> list[int] | None:
    """The versions of the turns that `ids` consist of; None if they are something else."""
    versions: list[int] = []
    for sampled_ids, sampled_versions in turns:
        part = ids[len(versions) : len(versions) + len(sampled_ids)]
        if part != sampled_ids[: len(part)]:
            continue  # the loop did not use this turn, or only in other words
        versions += sampled_versions[: len(part)]
        if len(versions) == len(ids):
            return versions
    return None
