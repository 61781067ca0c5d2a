"""The ragged record of what was generated: segments, trajectories, groups.

A `Trajectory` is one sample of one prompt. It grows by whole segments, each written by one author,
and segments are never changed: a conversation that rewrites its history forks, so segments form a
tree in which a path from root to leaf is one row of training. `Group` holds all trajectories of one
prompt. Padded columns (`DataProto`) are made from these when somebody asks for them.

A grade is a score, no verdict, or a fault. The three stay different things: a fault of a grader
says nothing about the response, so it never becomes a reward.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

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
    """The grader cannot judge this response; it takes no part in training."""

    reason: str


@dataclass(frozen=True)
class InfraError:
    """Grading failed: an exception, a time-out, a result that is no score."""

    reason: str
    is_timeout: bool = False
    is_final: bool = False
    """It was retried already, so the group is not graded a second time."""


Grade = Score | Abstain | InfraError


@dataclass(frozen=True)
class MediaRef:
    """An image or video of a segment, by the hash of its content."""

    kind: Literal["image", "video"]
    content_hash: str


@dataclass(kw_only=True)
class Segment:
    """Consecutive tokens of one author; append-only."""

    author: Author
    token_ids: list[int]
    is_trained: bool = False
    log_probs: list[float] | None = None
    """Of model segments: one per token, under the weights that sampled it."""

    versions: list[int] | None = None
    """Of model segments: the policy version that sampled each token."""

    parent: int = -1
    """Index of the segment this one follows; -1 begins the conversation."""

    media: tuple[MediaRef, ...] = ()
    routed_experts: np.ndarray | None = None


@dataclass(kw_only=True)
class AgentLoopMetrics:
    """Where the time of one trajectory went."""

    generate_sequences: float = 0.0
    """Seconds of generation."""

    tool_calls: float = 0.0
    """Seconds in tools."""

    num_preempted: int = -1
    """Times the engine computed its keys and values again; -1 if the engine does not tell."""


@dataclass(kw_only=True)
class Trajectory:
    """One sample of one prompt: a tree of segments, grade, timing."""

    uid: str
    """Of the prompt; equal for all samples of one prompt in one step."""

    sample: int
    """Number of this sample among those of its prompt."""

    row: Mapping[str, Any]
    """The columns of the dataset row."""

    segments: list[Segment] = field(default_factory=list)
    seed: int | None = None
    session_id: str | None = None
    grade: Grade | None = None
    text: str | None = None
    """The response without special tokens, once somebody has decoded it."""

    stop_reason: str = ""
    num_turns: int = 0
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)

    def path(self, leaf: int = -1) -> list[Segment]:
        """The segments from the root to `leaf` (the last segment by default)."""
        index = leaf % len(self.segments) if self.segments else -1
        path: list[Segment] = []
        while index >= 0:
            path.append(self.segments[index])
            index = path[-1].parent
        return path[::-1]

    @property
    def num_prompt_segments(self) -> int:
        """Segments before the model's first one: together they are the prompt."""
        path = self.path()
        return next((i for i, s in enumerate(path) if s.author == "model"), len(path))

    @property
    def prompt_ids(self) -> list[int]:
        return [t for s in self.path()[: self.num_prompt_segments] for t in s.token_ids]

    @property
    def response_ids(self) -> list[int]:
        """Everything after the prompt, replies of tools included."""
        return [t for s in self.path()[self.num_prompt_segments :] for t in s.token_ids]

    @property
    def response_mask(self) -> list[int]:
        """1 for the model's tokens that are trained, 0 for what others wrote."""
        response = self.path()[self.num_prompt_segments :]
        return [int(s.is_trained) for s in response for _ in s.token_ids]


@dataclass(kw_only=True)
class Group:
    """All trajectories of one prompt; `index` in the data order is the admission key."""

    index: int
    uid: str
    drawn_at: int
    """The step whose prompts it was drawn with."""

    trajectories: list[Trajectory] = field(default_factory=list)
    fault: str | None = None
    """Why the group cannot be trained on, where it cannot."""
