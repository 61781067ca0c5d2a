"""Answers that the exact grader cannot read, given to the package math-verify (sympy).

`grade_or_ask` is the verdict of `math_grader`; where that does not know the mathematics (integrals,
sums, cases) and math-verify is installed, the verdict of math-verify. That may hang or eat memory,
so it runs in worker processes that end at a limit and are then replaced:

    calling thread                         worker process (`math_verify_worker`)
      takes an idle worker, or starts one     waits for a question
      writes the question                     compares: 1 s of CPU time, 256 MB at most
      waits for the answer, 5 s at most       writes the answer
      gives the worker back, or kills it

A killed worker has not said that the answer is wrong: `second_opinion` abstains, and only
`compute_score` turns that into the number its caller chose.
"""

import atexit
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl.utils import line
from verl.utils.import_utils import is_available
from verl.utils.line import BrokenLineError, Line
from verl.utils.reward_score.math_grader import Abstain, Correct, Verdict, Wrong, grade

CPU_SECONDS = 1.0
MEMORY_MB = 256
DEADLINE_SECONDS = 5.0
"""By the clock, for a worker that waits for something or gets no CPU."""

START_SECONDS = 60.0
MAX_CHARACTERS = 10_000
"""Of the end of a response, where the answer is. A question fits into a pipe: no write waits."""

MAX_GOLD_CHARACTERS = 2000
MAX_REPLY_BYTES = 1 << 16

MAX_IDLE_WORKERS = 8
COMMANDS = frozenset({"int", "sum", "prod", "lim", "max", "min", "gcd", "lcm"})
"""What math-verify evaluates and the exact grader does not read."""


_COMMAND = re.compile(r"\\(?:[a-z]+|[,;:! ])")
_NO_FORMULA = re.compile(r"[A-Za-z]{3}|__|[^A-Za-z0-9^_{}()+\-*/.,=|$! ]")


class WorkerKilled(RuntimeError):
    """The worker passed a limit of time or memory."""


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0) -> float | None:
    """1 if math-verify finds the ground truth in the response, 0 if it finds another answer.

    `timeout_score` where it passed a limit; None (no verdict) where it raised an error.
    """
    try:
        verdict = _asked(model_output, str(ground_truth))
    except WorkerKilled:
        return timeout_score
    return None if isinstance(verdict, Abstain) else float(isinstance(verdict, Correct))


def grade_or_ask(answer: str, gold: str) -> Verdict:
    """Whether `answer` says the same as `gold`, by the exact grader or else by math-verify.

    math-verify is asked where `COMMANDS` stand in the answers and both are one expression: it picks
    what it likes from longer texts. Other abstentions stay: what is too large to compute, and what
    has no certain meaning.
    """
    verdict = grade(answer, gold)
    is_for_library = isinstance(verdict, Abstain) and verdict.command in COMMANDS
    is_readable = is_for_library and _is_expression(answer) and _is_expression(gold)
    if not is_readable or not is_available("math_verify"):
        return verdict
    return second_opinion(f"\\boxed{{{answer}}}", gold)


def _is_expression(text: str) -> bool:
    """Whether it holds nothing but a formula: no list, no equation, no words."""
    bare = _COMMAND.sub(" ", text)
    depth = 0
    for character in bare:
        depth += (character in "({") - (character in ")}")
        if depth == 0 and character in ",=":
            return False
    return _NO_FORMULA.search(bare) is None


def second_opinion(model_output: str, ground_truth: str) -> Verdict:
    """The verdict of math-verify; `Abstain` where it failed or passed a limit."""
    try:
        return _asked(model_output, ground_truth)
    except WorkerKilled as reason:
        return Abstain(str(reason))


def close_workers() -> None:
    """End the idle workers; the next question starts a new one."""
    _pool.close()


def _asked(answer: str, gold: str) -> Verdict:
    if not is_available("math_verify"):
        raise ImportError(
            "verl.utils.reward_score.math_verify needs the package math-verify, which is not "
            "installed: pip install verl[math]; verl.utils.reward_score.math_grader needs nothing"
        )
    if len(gold) > MAX_GOLD_CHARACTERS:
        return Abstain(f"the gold answer has more than {MAX_GOLD_CHARACTERS} characters")
    reply = _pool.ask({"answer": answer[-MAX_CHARACTERS:], "gold": gold})
    if "error" in reply:
        return Abstain(f"math-verify failed: {reply['error']}")
    return Correct() if reply["equal"] else Wrong("math-verify finds another answer")


class _Worker:
    def __init__(self) -> None:
        script = str(Path(__file__).with_name("math_verify_worker.py"))
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", script, str(MEMORY_MB), str(CPU_SECONDS), line.__file__],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                start_new_session=True,
            )
        self._line = Line(ours, max_bytes=MAX_REPLY_BYTES)
        self._numbers = itertools.count()
        try:
            self._reply(next(self._numbers), time.monotonic() + START_SECONDS)
        except WorkerKilled as error:
            raise RuntimeError(f"the worker for math-verify did not start: {error}") from error

    def ask(self, question: dict[str, str]) -> dict[str, Any]:
        content = json.dumps(question, ensure_ascii=False).encode(errors="replace")
        number, deadline = next(self._numbers), time.monotonic() + DEADLINE_SECONDS
        try:
            self._line.begin_call(number, content, deadline=deadline)
        except (OSError, EOFError, BrokenLineError) as error:
            self.kill()
            raise WorkerKilled(f"the worker for math-verify is gone: {error}") from error
        return self._reply(number, deadline)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=10)
        self._line.close()

    def _reply(self, number: int, deadline: float) -> dict[str, Any]:
        """What it says to that question; a worker that says nothing or something else is killed."""
        try:
            return json.loads(self._line.end_call(number, deadline=deadline))
        except TimeoutError as error:
            self.kill()
            raise WorkerKilled("math-verify did not reply in time") from error
        except (OSError, EOFError) as error:
            self.kill()
            raise WorkerKilled(self._cause_of_death()) from error
        except (BrokenLineError, ValueError) as error:
            self.kill()
            raise WorkerKilled(f"math-verify gave no reply: {error}") from error

    def _cause_of_death(self) -> str:
        if self._process.returncode == -signal.SIGPROF:
            return f"math-verify took more than {CPU_SECONDS:g} s of CPU time"
        return f"math-verify died, perhaps of its limit of {MEMORY_MB} MB"


class _Pool:
    """Idle workers. A fork of this process must not talk to them: it starts its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._inherited: list[_Worker] = []
        os.register_at_fork(after_in_child=self._forget)

    def ask(self, question: dict[str, str]) -> dict[str, Any]:
        worker = self._take() or _Worker()
        reply = worker.ask(question)
        with self._lock:
            if len(self._idle) < MAX_IDLE_WORKERS:
                self._idle.append(worker)
                return reply
        worker.kill()
        return reply

    def close(self) -> None:
        while (worker := self._take()) is not None:
            worker.kill()

    def _take(self) -> _Worker | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._inherited, self._idle = self._idle, []  # kept, for closing them is the parent's part


_pool = _Pool()
atexit.register(close_workers)
