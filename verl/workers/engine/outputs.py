"""What a forward pass computes beside `log_probs` and `entropy`, declared by the caller.

Each field asks for columns; the pass computes nothing that nobody has asked for. Divergences to
teachers need the teachers' hidden states of the same rows, which `given` computes before the pass:
a model whose ranks gather weights in a pass cannot run another one inside.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.algos.distillation import Divergence
from verl.models.head import OutputHead

TEACHER_INDEX = "teacher_index"
"""(B,) the number of each row's teacher; a column that is there if there are several."""


class StatesOfTeacher(Protocol):
    """A model that is compared with, over the whole vocabulary."""

    @property
    def is_collective(self) -> bool:
        """Whether ranks exchange tensors in its pass, so that all must make it."""
        ...

    def states(self, rows: TensorDict) -> Tensor:
        """(B, T, hidden), the last hidden states that predict the response tokens."""
        ...

    def head(self) -> OutputHead:
        """The output layer, its weights whole."""
        ...


@dataclass(frozen=True, kw_only=True)
class TeacherStates:
    """One teacher's states for the rows of a micro-batch that are its own."""

    is_own: Tensor
    """(B,) which rows."""

    states: Tensor
    """(b, T, hidden)."""

    head: OutputHead


@dataclass(frozen=True, kw_only=True)
class ToTeachers:
    """A divergence over the whole vocabulary, to the teacher of each row."""

    divergence: Divergence
    teachers: Sequence[StatesOfTeacher]
    given: tuple[TeacherStates, ...] = ()

    def of_rows(self, rows: TensorDict) -> "ToTeachers":
        """With the states of all teachers for these rows."""
        has_several = TEACHER_INDEX in rows.keys()  # noqa: SIM118 (a TensorDict)
        teacher_of = rows[TEACHER_INDEX].cpu() if has_several else torch.zeros(len(rows))
        given = []
        for number, teacher in enumerate(self.teachers):
            is_own = teacher_of == number
            if is_own.any():
                own = rows if is_own.all() else rows[is_own]
                found = TeacherStates(
                    is_own=is_own, states=teacher.states(own), head=teacher.head()
                )
                given.append(found)
            elif teacher.is_collective:  # the other ranks may have rows for it
                teacher.states(rows[:1])
                teacher.head()
        return replace(self, given=tuple(given))


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Columns of a language model, each (B, T) unless it says otherwise."""

    sum_pi_squared: bool = False
    """`sum_pi_squared`, without gradient."""

    top_k: int = 0
    """`top_ids` and `top_log_probs`, (B, T, K): the likeliest tokens, without gradient."""

    log_probs_at: str | None = None
    """`log_probs_at`, (B, T, K): those of the ids in this column of the rows, (B, T, K)."""

    states: bool = False
    """`states`, (B, T, hidden), and nothing else: what the output layer would read."""

    to_teachers: ToTeachers | None = field(default=None)
    """`divergence`, and `same_top`: whether student and teacher find the same token likeliest."""

    def given(self, rows: TensorDict) -> "Outputs":
        """The same request with what must be computed before the pass over these rows."""
        if self.to_teachers is None:
            return self
        return replace(self, to_teachers=self.to_teachers.of_rows(rows))


LOG_PROBS = Outputs()
"""Nothing beside log-probabilities and entropy."""
