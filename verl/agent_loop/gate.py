"""`Gate`: between agent loops and engines, so that weights may change while rows are generated.

    loop --generate--> turn(row)  --ask--> engine          the schedule says up to which token
                         |   ^                             the row may go with these weights
                         |   +-- aborted, or at the limit: asked again for the rest
                         +-- ended, but beyond what is known of the next update: held

    trainer: settle()   whoever decides has ended; requests are aborted, rows that ran ahead are
                        cut back, rows that are behind run up to the clock of the update; then
                        no row samples until publish()

A loop does not notice: it gets one turn, of tokens that several versions may have sampled. All of
it happens on the event loop of the agent loops; `settle` and `publish` are called from the
trainer's thread. What rows have sampled by the clock of an update is all that a run needs to
continue from there (`recorded`): loops are run again and get recorded turns back.
"""

import asyncio
import heapq
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from verl.agent_loop.schedule import RowClock, Schedule
from verl.config.async_plan import AsyncPlan
from verl.workers.rollout.base import TokenOutput

Ask = Callable[[list[int], int], Awaitable[TokenOutput]]
"""Continue a turn of which there are these tokens by at most so many."""

RowKey = tuple[int, int]
"""Index of the group and number of the sample."""


@dataclass(eq=False)
class Row:
    """One sample on its way through the gate."""

    gate: "Gate"
    key: RowKey
    clock: RowClock
    start: int
    turns: list[TokenOutput] = field(default_factory=list)
    recorded: list[TokenOutput] = field(default_factory=list)
    """Turns that an earlier run has sampled; the last of them may not have ended."""

    place: str = "outside"
    """`outside`: in a tool or in its loop; `sampling`; `held`; `waiting` for the update."""

    released: "asyncio.Future[None] | None" = None


gated_row: ContextVar[Row | None] = ContextVar("gated_row", default=None)
"""The row that this task works on, where the run is asynchronous."""


class Gate:
    """The rows of an asynchronous run. `abort` ends all requests in flight with what they have."""

    def __init__(
        self,
        plan: AsyncPlan,
        num_groups: int,
        loop: asyncio.AbstractEventLoop,
        abort: Callable[[], None],
    ) -> None:
        self.schedule = Schedule(plan, num_groups)
        self.rows: dict[RowKey, Row] = {}
        self.num_cut = 0
        """Tokens that were sampled in vain, because their row had run ahead of an update."""

        self.seconds_closed = 0.0
        """In which no row could sample: from when all had settled until the update was visible."""

        self._closed_at = 0.0
        self._loop = loop
        self._abort = abort
        self._cut: int | None = None
        self._held: list[tuple[int, RowKey]] = []
        self._unsettled: set[Row] = set()
        self._changed: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._recorded: dict[RowKey, tuple[int, list[TokenOutput]]] = {}

    # ---- rows, on the event loop -----------------------------------------------------------------

    def begin(self, index: int, sample: int) -> Row:
        """A sample of group `index` starts."""
        key = (index, sample)
        start, recorded = self._recorded.pop(key, (self.schedule.clock, []))
        row = Row(self, key, self.schedule.begin(index, start), start, recorded=recorded)
        self.rows[key] = row
        return row

    def end(self, row: Row) -> None:
        """The loop of the row has returned."""
        self.schedule.end(row.clock)
        self._look_at(row)
        self._release_held()

    async def turn(self, row: Row, ask: Ask, max_tokens: int) -> TokenOutput:
        """One turn of the model, of at most `max_tokens`."""
        number, schedule = len(row.turns), self.schedule
        if number:
            schedule.advance(row.clock, schedule.plan.reply_tokens)
        output = TokenOutput()
        row.turns.append(output)
        if number < len(row.recorded):
            self._add(row, output, row.recorded[number], max_tokens)
            output.stop_reason = row.recorded[number].stop_reason
        try:
            while not output.stop_reason or not self._is_final(row):
                if output.stop_reason:
                    await self._wait(row, "held")
                    continue
                room = max_tokens - len(output.token_ids)
                if self._cut is not None:
                    room = min(room, self._cut - row.clock.clock)
                if room <= 0:
                    self._cut_back(row)
                    await self._wait(row, "waiting")
                    continue
                row.place = "sampling"
                self._add(row, output, await ask(output.token_ids, room), max_tokens)
        finally:
            row.place = "outside"
        self._look_at(row)
        self._release_held()
        return replace(output)  # what a loop does with it does not change what is recorded

    def _add(self, row: Row, output: TokenOutput, part: TokenOutput, max_tokens: int) -> None:
        output.token_ids += part.token_ids
        output.log_probs += part.log_probs
        output.policy_versions += part.policy_versions
        output.num_preempted += part.num_preempted
        is_limited = part.stop_reason == "length" and len(output.token_ids) < max_tokens
        goes_on = is_limited or part.stop_reason == "abort"
        output.stop_reason = "" if goes_on else part.stop_reason
        self.schedule.advance(row.clock, len(part.token_ids))

    def _is_final(self, row: Row) -> bool:
        """Whether what the row has sampled cannot be cut back any more."""
        if self._cut is not None:
            return row.clock.clock <= self._cut
        return self.schedule.decides(row.clock) or row.clock.clock <= self.schedule.horizon

    async def _wait(self, row: Row, place: str) -> None:
        """Until the row may go on; it may have been cut back."""
        row.place = place
        row.released = self._loop.create_future()
        if place == "held":
            heapq.heappush(self._held, (row.clock.clock, row.key))
            if self._cut is not None:
                self._cut_back(row)
                release(row)
        self._look_at(row)
        try:
            await row.released
        finally:
            row.released = None

    def _cut_back(self, row: Row) -> None:
        """Take from a row what its turn sampled beyond the clock of the update."""
        assert self._cut is not None
        output = row.turns[-1]
        excess = min(row.clock.clock - self._cut, len(output.token_ids))
        if excess > 0:
            kept = len(output.token_ids) - excess
            del output.token_ids[kept:], output.log_probs[kept:], output.policy_versions[kept:]
            output.stop_reason = ""
            self.schedule.advance(row.clock, -excess)
            self.num_cut += excess

    def _release_held(self) -> None:
        while self._held and self._held[0][0] <= self.schedule.horizon:
            row = self.rows.get(heapq.heappop(self._held)[1])
            if row is not None and row.place == "held":
                release(row)

    def _look_at(self, row: Row) -> None:
        """Tell whoever waits for rows to be where the update finds them."""
        if row in self._unsettled and self._is_settled(row):
            self._unsettled.discard(row)
        self._tell()

    def _is_settled(self, row: Row) -> bool:
        assert self._cut is not None
        if row.clock.has_ended or row.place == "waiting":
            return True
        reply = self.schedule.plan.reply_tokens if row.turns else 0
        return row.place == "outside" and row.clock.clock + reply >= self._cut

    def _tell(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            if self._error is not None:
                raise self._error
            self._changed = self._loop.create_future()
            await self._changed

    # ---- updates, from the trainer's thread ------------------------------------------------------

    def settle(self) -> None:
        """Bring every row to where the next update finds it; then no row samples."""
        asyncio.run_coroutine_threadsafe(self._settle(), self._loop).result(timeout=None)

    async def _settle(self) -> None:
        schedule = self.schedule
        await self._until(lambda: not schedule.running)
        self._cut = schedule.update_clock()
        self._held.clear()
        for row in self.rows.values():
            if row.place == "held":
                self._cut_back(row)
                release(row)
        self._unsettled = {row for row in self.rows.values() if not self._is_settled(row)}
        self._abort()
        await self._until(lambda: not self._unsettled)
        self._closed_at = time.perf_counter()

    def publish(self) -> None:
        """The engines have the new weights: rows go on with them."""
        asyncio.run_coroutine_threadsafe(self._publish(), self._loop).result(timeout=None)

    async def _publish(self) -> None:
        assert self._cut is not None, "settle comes first"
        self.seconds_closed += time.perf_counter() - self._closed_at
        self.schedule.publish(self._cut)
        self._cut = None
        first = self.schedule.published * self.schedule.plan.batch
        self.rows = {key: row for key, row in self.rows.items() if key[0] >= first}
        for row in self.rows.values():
            release(row)

    def fail(self, error: BaseException) -> None:
        """Generation has failed; for any thread."""

        def tell() -> None:
            self._error = error
            self._tell()

        self._loop.call_soon_threadsafe(tell)

    # ---- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where rows stand between `settle` and `publish`, of steps that are not published then."""
        schedule = self.schedule
        first = schedule.next_update * schedule.plan.batch
        rows = [row for key, row in sorted(self.rows.items()) if key[0] >= first]
        turns = [turn for row in rows for turn in row.turns]
        return {
            "published": schedule.next_update,
            "clock": self._cut,
            "rows": [[*row.key, row.start, len(row.turns)] for row in rows],
            "turns": [[len(t.token_ids), t.num_preempted, t.stop_reason] for t in turns],
            "token_ids": joined((t.token_ids for t in turns), torch.long),
            "log_probs": joined((t.log_probs for t in turns), torch.double),
            "policy_versions": joined((t.policy_versions for t in turns), torch.long),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        schedule = self.schedule
        schedule.published = state["published"]
        schedule.clock = schedule.horizon = state["clock"]
        columns = [state[name].tolist() for name in ("token_ids", "log_probs", "policy_versions")]
        turns: list[TokenOutput] = []
        at = 0
        for length, num_preempted, stop_reason in state["turns"]:
            ids, log_probs, versions = (column[at : at + length] for column in columns)
            turns.append(
                TokenOutput(
                    token_ids=ids,
                    log_probs=log_probs,
                    policy_versions=versions,
                    num_preempted=num_preempted,
                    stop_reason=stop_reason,
                )
            )
            at += length
        at = 0
        for index, sample, start, num_turns in state["rows"]:
            self._recorded[index, sample] = start, turns[at : at + num_turns]
            at += num_turns


def release(row: Row) -> None:
    if row.released is not None and not row.released.done():
        row.released.set_result(None)


def joined(parts: "Sequence[Sequence[Any]] | Any", dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([value for part in parts for value in part], dtype=dtype)
