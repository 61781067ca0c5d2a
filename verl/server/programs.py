"""Agent programs as processes: what they are given, how long they may run, what they leave.

    trainer --> supervisor --> program --> whatever it starts

The supervisor ends with the trainer and ends everything below it (`supervisor`). Output beyond the
limit is read and thrown away, so that a program never waits for its reader.
"""

import asyncio
import json
import math
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from verl.server.jailed import REWARD_INSIDE, Jail, sockets
from verl.utils.environment import all_variables
from verl.utils.sandbox.sandbox import (
    START,
    SandboxError,
    SandboxUnavailable,
    check_available,
    open_pipe,
    read_now,
    sealed_file,
    supervisor_environment,
)
from verl.utils.timeouts import within

SUPERVISOR = Path(__file__).with_name("supervisor.py")
END_SECONDS = 7.0
"""Time for the supervisor to end what the program left, before it is killed itself."""

MAX_ROW_VARIABLE = 64 << 10
"""Longest row that is in the environment too; Linux allows 128 KiB per variable."""

MAX_REWARD_BYTES = 1 << 20
MAX_EXTRAS, MAX_EXTRA_CHARACTERS = 32, 1000
REWARD_FILE = "{VERL_REWARD_FILE}"
"""Stands in a command for the file that the variable of this name has."""

SANDBOX_SECONDS = 30.0
"""Time to build the sandbox of a program and to take it down."""

DRAIN_SECONDS = 1.0
"""Time to read what is left in the pipes of a program that has ended."""

PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE")
Outcome = Literal["finished", "failed", "timeout"]


@dataclass(frozen=True, kw_only=True)
class ProgramSpec:
    """How to run a program."""

    command: tuple[str, ...]
    timeout_seconds: float
    environment: Mapping[str, str]
    """Beside `PASSED_ON` and what the gateway adds."""

    cwd: str | None = None
    """None is a folder of its own, which is removed afterwards."""

    max_output_bytes: int = 16 << 10
    """Of stdout and stderr each, the end is kept."""

    jail: Jail | None = None
    """The sandbox that it runs in; None is none."""


@dataclass(frozen=True, kw_only=True)
class ProgramEnd:
    """How a program ended."""

    outcome: Outcome
    exit_code: int
    stdout: str
    stderr: str
    reward: float | None
    reward_extras: dict[str, Any]
    seconds: float


class RewardError(ValueError):
    """A program wrote something that is no reward."""


def argv(command: str | Sequence[str]) -> tuple[str, ...]:
    """A command as a list; a text is split as a shell would, and no shell runs."""
    parts = shlex.split(command) if isinstance(command, str) else [str(part) for part in command]
    if not parts:
        raise ValueError("the command of a program_agent is empty; it names a program to run")
    return tuple(parts)


async def run_program(
    spec: ProgramSpec, row: Mapping[str, Any], endpoint: Mapping[str, str]
) -> ProgramEnd:
    """Run to the end or the deadline; nothing of the program is left in any case."""
    text = json.dumps(plain(row))
    folder = tempfile.TemporaryDirectory(prefix="verl-program-", ignore_cleanup_errors=True)
    try:
        return await _run_in(Path(folder.name), spec, text, endpoint)
    finally:
        await asyncio.to_thread(folder.cleanup)


async def _run_in(
    folder: Path, spec: ProgramSpec, row_text: str, endpoint: Mapping[str, str]
) -> ProgramEnd:
    reward_file, home = folder / "reward.json", folder / "home"
    home.mkdir()
    environment = {**spec.environment, **endpoint}
    if len(row_text) <= MAX_ROW_VARIABLE:
        environment["VERL_ROW"] = row_text
    start = time.monotonic()
    run = _with_supervisor if spec.jail is None else _with_sandbox
    outcome, code, tails = await run(folder, spec, row_text, environment)
    try:
        reward, extras = await asyncio.to_thread(read_reward, reward_file)
    except RewardError:
        if outcome == "finished":
            raise
        reward, extras = None, {}  # it may have been ended in the middle of writing
    return ProgramEnd(
        outcome=outcome,
        exit_code=code,
        stdout=tails[0].text(),
        stderr=tails[1].text(),
        reward=reward,
        reward_extras=extras,
        seconds=time.monotonic() - start,
    )


async def _with_supervisor(
    folder: Path, spec: ProgramSpec, row_text: str, environment: Mapping[str, str]
) -> tuple[Outcome, int, list["Tail"]]:
    reward_file, home = folder / "reward.json", folder / "home"
    inherited = all_variables()
    passed_on = {name: inherited[name] for name in PASSED_ON if name in inherited}
    own = {"HOME": str(home), "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(SUPERVISOR),
        *(part.replace(REWARD_FILE, str(reward_file)) for part in spec.command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=spec.cwd or str(home),
        env={**passed_on, **own, **environment, "VERL_REWARD_FILE": str(reward_file)},
        start_new_session=True,
    )  # fmt: skip
    has_ended, tails = await watch(process, spec, spec.timeout_seconds, row_text.encode())
    code = process.returncode
    assert code is not None
    return "timeout" if not has_ended else "failed" if code else "finished", code, tails


async def _with_sandbox(
    folder: Path, spec: ProgramSpec, row_text: str, environment: Mapping[str, str]
) -> tuple[Outcome, int, list["Tail"]]:
    """The sandbox keeps the deadline and ends everything; its verdict says how it went."""
    assert spec.jail is not None
    await asyncio.to_thread(check_available)
    with ExitStack() as resources:
        row_fd = sealed_file(row_text.encode(), resources)
        verdict_fd, verdict_end = open_pipe(resources)
        jail = spec.jail.spec(
            [part.replace(REWARD_FILE, REWARD_INSIDE) for part in spec.command],
            environment,
            folder=folder,
            timeout_seconds=spec.timeout_seconds,
            fds=(row_fd, verdict_end),
        )
        async with sockets(folder, environment["OPENAI_BASE_URL"], folder / "reward.json"):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-c", START,
                stdin=sealed_file(jail.to_json().encode(), resources),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(row_fd, verdict_end),
                env=supervisor_environment(),
                start_new_session=True,
            )  # fmt: skip
            deadline = spec.timeout_seconds + SANDBOX_SECONDS
            has_ended, tails = await watch(process, spec, deadline, None)
        verdict = read_now(verdict_fd)
    if not has_ended or not verdict:
        raise SandboxError(f"the sandbox of a program died: {tails[1].text()[-2000:]}")
    told = json.loads(verdict)
    if told["cause"] == "setup":
        raise SandboxUnavailable(told["reason"])
    code = int(told["exit_code"])
    outcome: Outcome = "failed" if code else "finished"
    if told["cause"] == "memory":
        tails[1].add(f"\nended: more than {spec.jail.memory_mb} MB of memory".encode())
    return "timeout" if told["cause"] == "timeout" else outcome, code, tails


async def watch(
    process: asyncio.subprocess.Process, spec: ProgramSpec, seconds: float, row: bytes | None
) -> tuple[bool, list["Tail"]]:
    """Feed a process and read what it writes, until it ends or the deadline ends it; whether it
    ended by itself, and the ends of both outputs."""
    assert process.stdout is not None
    assert process.stderr is not None
    tails = [Tail(spec.max_output_bytes), Tail(spec.max_output_bytes)]
    tasks = [
        asyncio.create_task(tails[0].fill(process.stdout)),
        asyncio.create_task(tails[1].fill(process.stderr)),
    ]
    if row is not None:
        assert process.stdin is not None
        tasks.append(asyncio.create_task(feed(process.stdin, row)))
    try:
        has_ended = await ended_within(process, seconds)
    finally:
        await end(process)
        await asyncio.wait(tasks, timeout=DRAIN_SECONDS)
        for task in tasks:
            task.cancel()
    return has_ended, tails


async def ended_within(process: asyncio.subprocess.Process, seconds: float) -> bool:
    try:
        await within(asyncio.subprocess.Process.wait(process), seconds)
    except TimeoutError:
        return False
    return True


async def end(process: asyncio.subprocess.Process) -> None:
    """Let the supervisor end the program and all below it; end the supervisor if it does not."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        if not await ended_within(process, END_SECONDS):
            process.kill()
            await ended_within(process, END_SECONDS)
    with suppress(ProcessLookupError):  # the usual case: nobody of its process group is left
        os.killpg(process.pid, signal.SIGKILL)


async def feed(pipe: asyncio.StreamWriter, data: bytes) -> None:
    """Write the row; a program that does not read it closes the pipe as it ends."""
    with suppress(BrokenPipeError, ConnectionResetError):
        pipe.write(data)
        await pipe.drain()
    pipe.close()


class Tail:
    """The end of what a program writes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept = bytearray()
        self._num_bytes = 0

    async def fill(self, pipe: asyncio.StreamReader) -> None:
        while part := await pipe.read(1 << 16):
            self.add(part)

    def add(self, part: bytes) -> None:
        self._num_bytes += len(part)
        self._kept += part
        del self._kept[: -self._max_bytes or len(self._kept)]

    def text(self) -> str:
        text = self._kept.decode(errors="replace")
        num_lost = self._num_bytes - len(self._kept)
        return f"({num_lost} bytes left out)...{text}" if num_lost else text


# ---- rows and rewards ----------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A row as JSON can write it."""
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


def read_reward(file: Path) -> tuple[float | None, dict[str, Any]]:
    """The reward in a file: a number, or an object with `reward` (or `score`) and further values;
    None if the program wrote no file."""
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_REWARD_BYTES + 1)
    except FileNotFoundError:
        return None, {}
    if len(text) > MAX_REWARD_BYTES:
        raise RewardError(f"a program wrote a reward of more than {MAX_REWARD_BYTES} bytes")
    try:
        value = json.loads(text)
    except ValueError:
        raise RewardError(f"a program wrote the reward {text[:200]!r}; {REWARD_RULE}") from None
    extras = dict(value) if isinstance(value, dict) else {}
    reward = extras.pop("reward", extras.pop("score", None)) if extras else value
    if isinstance(reward, bool):
        reward = float(reward)
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise RewardError(f"a program wrote the reward {text[:200]!r}; {REWARD_RULE}")
    if len(extras) > MAX_EXTRAS:
        raise RewardError(
            f"a program wrote {len(extras)} values beside its reward; at most {MAX_EXTRAS} are "
            "reported"
        )
    return float(reward), {name: reported(inner) for name, inner in extras.items()}


def reported(value: Any) -> Any:
    """Numbers and truth values as they are, anything else as a short text."""
    if isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:MAX_EXTRA_CHARACTERS]


REWARD_RULE = "it must be a finite number, or an object with a finite number as reward or score"
