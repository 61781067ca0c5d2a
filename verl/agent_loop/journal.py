"""The journal: every reply from outside, written beside the trajectory that it is part of.

    loop                              journal                              world
      journalled(kind, request, call)   ended before the run was killed?
                                          yes: the reply as it was
                                          no:  call() ------------------->   tool, user, environment
                                        append to step_000012.jsonl  <----   reply

Tokens follow from seeds; what tools, users and environments reply does not. With their replies on
disk a step can be made again, bit for bit, without asking them: by a run that was killed, and by
`verl.trainer.main_replay`.

A reply is found by the step, the trajectory and its number within it, and counts only for the same
request. Replies are taken from the journal for whole trajectories: one that had not ended begins
anew and asks for everything, because a tool or environment that keeps state must see all calls.
Each line has a checksum, so that a line that a kill cut short is recognised.
"""

import asyncio
import hashlib
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from verl.agent_loop.journal_files import JournalFiles, Recorded, RecordedStep
from verl.protocol.trajectory import InfraFault
from verl.utils.rollout_trace import rollout_trace_span

logger = logging.getLogger(__name__)

JOURNAL = "journal"
"""The folder's name, beside the checkpoints of the run."""

JOURNAL_CONFIG = "config.json"
"""In it, the configuration of the run, for replays."""

JSON = Any
Call = Callable[[], Awaitable[JSON]]
Phase = Literal["train", "greedy", "validation"]
Mode = Literal["resume", "replay", "live"]

MAX_REQUEST_BYTES = 4096
"""Longer requests are journalled by their hash and their beginning."""

MAX_REPLY_BYTES = 8 << 20

_VOLATILE = ("seconds",)
"""Fields of a reply that a second asking may change without anybody calling it different."""


class JournalMismatch(RuntimeError):
    """A step that is to be made from its journal asks for something that is not in it."""


class Tokens(Protocol):
    """What the journal sees of a loop's output."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None
    reward_score: float | None


def digest_of(outputs: Tokens | Sequence[Tokens] | None) -> str:
    """Of everything that training sees of a trajectory: equal digests are equal bits."""
    found = hashlib.sha256()
    if outputs is None:
        outputs = []
    for output in outputs if isinstance(outputs, Sequence) else [outputs]:
        for ids in (output.prompt_ids, output.response_ids, output.response_mask):
            found.update(np.array([len(ids), *ids], dtype=np.int64).tobytes())
        found.update(np.array(output.response_logprobs or [], dtype=np.float64).tobytes())
        found.update(repr(output.reward_score).encode())
    return found.hexdigest()


# ---- one trajectory ------------------------------------------------------------------------------

current_journal: ContextVar["TrajectoryJournal | None"] = ContextVar(
    "current_journal", default=None
)
"""The journal of the trajectory that this task works on."""


async def journalled(kind: str, request: JSON, call: Call) -> JSON:
    """What the world replies to `request`: by `call`, or as the journal has it.

    The one place through which replies from outside pass: outcomes of tools, replies of
    interactions, observations of environments. `request` and the reply are plain JSON data; an
    `InfraFault` is journalled too, and raised again. A reply comes back as JSON gives it back
    (tuples are lists), also where nothing is journalled.
    """
    journal = current_journal.get(None)
    with rollout_trace_span(kind, request) as record:
        if journal is None:
            reply = json.loads(_encode(kind, await call()))
        else:
            reply = await journal.reply(kind, request, call)
        if record is not None:
            record(reply)
    return reply


@dataclass(eq=False)
class TrajectoryJournal:
    """The replies of one trajectory, in the order in which they were asked for."""

    journal: "Journal"
    step: int
    phase: Phase
    uid: str
    sample: int
    recorded: "Recorded | None" = None
    """What an earlier run journalled of it; None where everything is asked live."""

    num_replies: int = 0
    _is_live: bool = False
    _taken: list[tuple[dict[str, Any], Call]] = field(default_factory=list)
    _catching_up: asyncio.Lock = field(default_factory=asyncio.Lock)
    _is_whole: bool = True

    @property
    def name(self) -> str:
        return f"step {self.step}, {self.phase}, prompt {self.uid}, sample {self.sample}"

    async def reply(self, kind: str, request: JSON, call: Call) -> JSON:
        # Numbered before anything is awaited: parallel calls are numbered in the order they start.
        number, self.num_replies = self.num_replies, self.num_replies + 1
        asked = stored_request(kind, request)
        if self.recorded is not None and not self._is_live:
            entry = self.recorded.replies.get(number)
            if entry is not None and (entry["kind"], entry["request"]) == (kind, asked):
                self._taken.append((entry, call))
                if self.journal.mode == "live":
                    await self._compare(entry, call)
                return replied(entry)
            if entry is None and self.recorded.digest is None:
                self._is_live = True  # so far it had come
            else:
                self._differs(number, kind, asked, entry)
        elif self.journal.mode != "resume":
            self._differs(number, kind, asked, None)
        await self._catch_up()
        return await self._ask(number, kind, asked, call)

    async def _ask(self, number: int, kind: str, asked: JSON, call: Call) -> JSON:
        entry = {"number": number, "kind": kind, "request": asked}
        try:
            text = _encode(kind, await call())
        except InfraFault as fault:
            await self._write({**entry, "fault": _told(fault)})
            raise
        if len(text) > MAX_REPLY_BYTES:
            self._is_whole = False
            self.journal.warn_once(
                "size",
                f"a {kind} reply of {len(text)} bytes ({self.name}) is not journalled; the limit "
                f"is {MAX_REPLY_BYTES}. A resumed run asks for that trajectory again",
            )
        else:
            await self._write(entry, b',"reply":' + text)
        return json.loads(text)

    def _differs(self, number: int, kind: str, asked: JSON, entry: dict[str, Any] | None) -> None:
        before = "nothing" if entry is None else f"{entry['kind']} {_short(entry['request'])}"
        message = (
            f"{self.name}: request {number} is {kind} {_short(asked)}, but the journal has {before}"
        )
        if self.journal.mode != "resume":
            raise JournalMismatch(f"{message}; the code or the settings are not those of the run")
        self._is_live = True
        self.journal.warn_once(
            "differs", f"{message}; it and what follows in the trajectory are asked live"
        )

    async def _catch_up(self) -> None:
        """Ask live what was taken from the journal, so that the world is where the replies say."""
        async with self._catching_up:
            taken, self._taken = self._taken, []
            for entry, call in taken:
                await self._write({key: entry[key] for key in ENTRY_KEYS if key in entry})
                await self._compare(entry, call)

    async def _compare(self, entry: dict[str, Any], call: Call) -> None:
        try:
            found: dict[str, Any] = {"reply": json.loads(_encode(entry["kind"], await call()))}
        except InfraFault as fault:
            found = {"fault": _told(fault)}
        if _settled(found) != _settled(entry):
            self.journal.add_difference(
                f"{self.name}: reply {entry['number']} to {entry['kind']} "
                f"{_short(entry['request'])} was {_short(_settled(entry))} and is now "
                f"{_short(_settled(found))}"
            )

    async def _write(self, entry: dict[str, Any], rest: bytes = b"") -> None:
        self.journal.files.append(self.step, self._line(entry, rest))
        await self.journal.files.make_room()

    def _line(self, entry: dict[str, Any], rest: bytes = b"") -> bytes:
        key = {"run": self.journal.run, "step": self.step, "phase": self.phase}
        key |= {"uid": self.uid, "sample": self.sample}
        return _encode("journal", {**key, **entry})[:-1] + rest + b"}"

    def end(self, result: Tokens | Sequence[Tokens] | InfraFault | None) -> None:
        """The loop has returned, or the world has failed it: there are no further replies."""
        fault = str(result) if isinstance(result, InfraFault) else None
        digest = digest_of(None if isinstance(result, InfraFault) else result)
        if self.recorded is not None and not self._is_live and self.recorded.digest is None:
            for entry, _ in self._taken:  # nothing was left to ask
                kept = {key: entry[key] for key in ENTRY_KEYS if key in entry}
                self.journal.files.append(self.step, self._line(kept))
            self._is_live = True
        if self.recorded is not None and not self._is_live:
            self.journal.add_ended(self.name, digest == self.recorded.digest)
        elif self._is_whole and self.journal.mode == "resume":
            end = {"end": self.num_replies, "digest": digest, "fault": fault}
            self.journal.files.append(self.step, self._line(end))


ENTRY_KEYS = ("number", "kind", "request", "reply", "fault")


def replied(entry: dict[str, Any]) -> JSON:
    if "fault" in entry:
        raise InfraFault(entry["fault"]["text"], reason=entry["fault"]["reason"])
    return entry["reply"]


def _told(fault: InfraFault) -> JSON:
    return {"text": str(fault), "reason": fault.reason}


def is_fault(entry: dict[str, Any]) -> bool:
    """Whether it says that the world was broken."""
    reply = entry.get("reply")
    return "fault" in entry or (isinstance(reply, dict) and reply.get("kind") == "infra")


def stored_request(kind: str, request: JSON) -> JSON:
    """The request as lines have it: itself, or the hash of a long one."""
    text = _encode(kind, request, sort_keys=True)
    if len(text) <= MAX_REQUEST_BYTES:
        return json.loads(text)
    start = text[:200].decode(errors="ignore")
    return {"sha256": hashlib.sha256(text).hexdigest(), "bytes": len(text), "start": start}


def _encode(kind: str, value: JSON, *, sort_keys: bool = False) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"a request or reply of {kind!r} cannot be journalled: {error}. Use plain data: None, "
            "numbers, text, lists, dicts with text as keys"
        ) from error
    return text.encode("utf-8", "surrogatepass")


def _settled(entry: dict[str, Any]) -> JSON:
    """A reply without what changes from one asking to the next."""
    if "fault" in entry:
        return {"fault": entry["fault"]}
    reply = entry["reply"]
    if isinstance(reply, dict):
        return {name: value for name, value in reply.items() if name not in _VOLATILE}
    return reply


def _short(value: JSON) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:200]}... ({len(text)} characters)"


# ---- a run ---------------------------------------------------------------------------------------


class Journal:
    """The journal of a run: a file per step below `folder`.

    A run that continues `after` a step takes the replies of later steps from their files
    (`resume`). In mode `replay` the world is never asked. In mode `live` it is asked beside, and
    what it replies otherwise is kept in `differences`. Neither of these writes.

    A trajectory is handed on when its replies are in the file (`files.written`), so that what a run
    has reported can be made again.
    """

    def __init__(self, folder: Path, *, after: int = -1, mode: Mode = "resume") -> None:
        self.files = JournalFiles(folder, is_read_only=mode != "resume")
        self.after = after
        self.mode: Mode = mode
        self.run = uuid.uuid4().hex[:12]
        self.differences: list[str] = []
        self.ended: dict[str, bool] = {}
        """Trajectories that were taken from the journal, and whether they became the same."""

        self._steps: dict[int, RecordedStep] = {}
        self._said: set[str] = set()

    async def begin(self, step: int) -> None:
        """Read what earlier runs journalled of a step; before its first trajectory."""
        if step not in self._steps:
            self._steps[step] = await self.files.load(step)

    def trajectory(
        self, step: int, phase: Phase, uid: str, sample: int, *, goes_on: bool = False
    ) -> TrajectoryJournal:
        """With `goes_on` also what a trajectory that had not ended was told: its turns so far are
        not sampled again."""
        found = self._steps[step]
        recorded = found.trajectories.get((phase, uid, sample))
        if recorded is None and goes_on:
            recorded = found.unfinished.get((phase, uid, sample))
        if recorded is not None and self.mode == "resume":
            # Unless the step was made to its end, a world that was broken gets another chance.
            entries = recorded.replies.values()
            has_failed = recorded.fault is not None or any(map(is_fault, entries))
            if step <= self.after or (has_failed and not found.is_complete):
                recorded = None
        return TrajectoryJournal(self, step, phase, uid, sample, recorded=recorded)

    def complete(self, step: int) -> None:
        """The step was made to its end; what follows from its replies may be reported."""
        is_new = step in self._steps and not self._steps[step].is_complete
        if self.mode == "resume" and is_new and self.files.has(step):
            entry = {"run": self.run, "complete": step}
            self.files.append(step, _encode("journal", entry), is_synced=True)
        self._steps = {later: found for later, found in self._steps.items() if later > step}

    def warn_once(self, about: str, message: str) -> None:
        if about not in self._said:
            self._said.add(about)
            logger.warning("%s", message)

    def add_difference(self, message: str) -> None:
        self.differences.append(message)
        self.warn_once("reply", message)

    def add_ended(self, name: str, is_same: bool) -> None:
        self.ended[name] = is_same
        if not is_same:
            self.warn_once(
                "tokens",
                f"{name}: with the journal's replies it did not become what it was, bit for bit; "
                "weights, code or settings are not those of the run",
            )
