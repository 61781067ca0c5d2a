"""Sessions: what counts as one sample where a conversation became several rows.

A conversation that forks, is compacted or has helpers is several rows of training and one sample.
The column `session_uid` is equal for the rows of a session, which come in the order in which they
were sampled; a batch without it has one row per session, and nothing here does anything to it.

    row 0   prompt            a1 a2 . .          trained tokens a, b, c; a token that stands in
    row 1   prompt, summary   b1 . . .           several rows is trained in one of them
    row 2   prompt, summary   b1* tool c1 .      * in the prompt or masked

    joined  [ ] a1 a2 b1 c1                      (S, W): the trained tokens of a session in order

Advantages are estimated on joined sessions: a session's return counts once in every mean, and a
token is credited with what later rows of its session earn. The estimator cannot see where a session
was cut, so what it says does not depend on it; that holds for users' own estimators too. Losses
take tokens as they are; where one divides by the length or the number of sequences, a sequence is a
session: `session_columns` gives each row the tokens of its session, `verl.workers.schedule` counts
sessions, `verl.algos.policy_losses.whole_sessions` is for losses that compare whole sequences.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.protocol.padded import SESSION_UID

SESSION_INDEX, SESSION_TOKENS = "session_index", "session_tokens"
"""Columns of an update, (B,): the number of a row's session, and the trained tokens it has."""


def session_numbers(batch: DataProto) -> Tensor | None:
    """(B,) the session of each row, counted by first appearance; None where each row is one."""
    names = batch.non_tensor_batch.get(SESSION_UID)
    if names is None:
        return None
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])


def session_ends(batch: DataProto) -> np.ndarray | None:
    """The last row of each session, which bears its reward; None where every row is a session."""
    names = batch.non_tensor_batch.get(SESSION_UID)
    if names is None:
        return None
    return np.array(sorted({name: row for row, name in enumerate(names)}.values()))


def one_row_per_session(batch: DataProto) -> DataProto:
    """The last row of each session."""
    ends = session_ends(batch)
    return batch if ends is None else batch.select_idxs(ends)


def session_sums(values: Tensor, batch: DataProto) -> Tensor:
    """(B, ...) to (S, ...): the sum over the rows of each session."""
    numbers = session_numbers(batch)
    if numbers is None:
        return values
    sums = values.new_zeros(int(numbers.max()) + 1, *values.shape[1:])
    return sums.index_add_(0, numbers.to(values.device), values)


def session_columns(batch: DataProto) -> dict[str, Tensor]:
    """What an update must know of sessions, as columns that travel with the rows."""
    numbers = session_numbers(batch)
    if numbers is None:
        return {}
    tokens = session_sums(batch.batch["response_mask"].sum(-1), batch)
    return {SESSION_INDEX: numbers, SESSION_TOKENS: tokens[numbers.to(tokens.device)]}


class JoinedSessions:
    """The trained tokens of S sessions side by side, (S, W).

    Place 0 is nobody's: it takes what is paid before the first trained token.
    """

    def __init__(self, numbers: Tensor, response_mask: Tensor) -> None:
        """`numbers` (B,) are the sessions of the rows, `response_mask` is (B, T)."""
        self.is_trained = response_mask.bool()
        self.numbers = numbers.to(response_mask.device)
        tokens = self.is_trained.sum(-1)  # (B,)
        order = torch.argsort(self.numbers, stable=True)
        before = torch.zeros_like(tokens)
        before[order] = tokens[order].cumsum(0) - tokens[order]  # in all rows sorted before
        most = int(tokens.sum())
        first = torch.full((int(numbers.max()) + 1,), most, device=tokens.device)
        first.scatter_reduce_(0, self.numbers, before, "amin")
        before = before - first[self.numbers]  # in earlier rows of the session
        self.place = before[:, None] + self.is_trained.long().cumsum(-1)  # (B, T)
        self.tokens = torch.zeros_like(first).index_add_(0, self.numbers, tokens)  # (S,)
        self.shape = (len(first), int(self.tokens.max()) + 1)
        self._cell = self.numbers[:, None] * self.shape[1] + self.place

    def mask(self, like: Tensor) -> Tensor:
        places = torch.arange(self.shape[1], device=like.device)
        return ((places >= 1) & (places <= self.tokens[:, None])).to(like.dtype)

    def join(self, values: Tensor) -> Tensor:
        """(B, T) values of trained tokens to (S, W), 0 elsewhere."""
        joined = values.new_zeros(self.shape[0] * self.shape[1])
        joined[self._cell[self.is_trained]] = values[self.is_trained]
        return joined.view(self.shape)

    def join_rewards(self, rewards: Tensor) -> Tensor:
        """(B, T) to (S, W): what is paid on any token goes to the last trained one up to there."""
        joined = rewards.new_zeros(self.shape[0] * self.shape[1])
        return joined.index_add_(0, self._cell.flatten(), rewards.flatten()).view(self.shape)

    def cut(self, joined: Tensor) -> Tensor:
        """(S, W) back to the rows, (B, T), 0 outside the mask."""
        return torch.where(self.is_trained, joined.flatten()[self._cell], 0)


def estimate_by_session(
    estimate: Callable[..., tuple[Tensor, Tensor]], arguments: Mapping[str, Any], batch: DataProto
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, (B, T): `estimate` is called with one row per session.

    Of `arguments`, tensors (B, T) are joined; of what else has an entry per row, the last row of a
    session speaks for it.
    """
    numbers, ends = session_numbers(batch), session_ends(batch)
    if numbers is None or ends is None:
        return estimate(**arguments)
    sessions = JoinedSessions(numbers, batch.batch["response_mask"])
    speaks = np.empty(sessions.shape[0], dtype=np.int64)
    speaks[numbers[ends].numpy()] = ends
    joined: dict[str, Any] = {}
    for name, value in arguments.items():
        if name == "token_level_rewards":
            joined[name] = sessions.join_rewards(value)
        elif name == "response_mask":
            joined[name] = sessions.mask(value)
        elif isinstance(value, Tensor) and value.shape == sessions.is_trained.shape:
            joined[name] = sessions.join(value)
        elif isinstance(value, Tensor | np.ndarray) and value.shape[:1] == (len(batch),):
            joined[name] = value[speaks]
        else:
            joined[name] = value
    advantages, returns = estimate(**joined)
    return sessions.cut(advantages), sessions.cut(returns)


def sequence_tokens(rows: Any) -> dict[str, Tensor]:
    """What `agg_loss` must know beside the counts of the step, for some rows of an update."""
    has_sessions = SESSION_TOKENS in rows.keys()  # noqa: SIM118 (a TensorDict)
    return {"sequence_tokens": rows[SESSION_TOKENS]} if has_sessions else {}
