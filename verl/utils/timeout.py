"""A time limit for one function call, as a decorator.

A thread cannot be stopped from outside, so the limit is kept by a child process (the default) or
by a signal. The child is forked: it starts in milliseconds and takes any function, closures too.
What a fork cannot do stays impossible: the child sees the caller's state but cannot change it, the
result must be picklable, and CUDA or torch's thread pools do not work in it. Long-lived grading
workers are the business of the reward code; this is for single calls.
"""

import functools
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_EXIT_SECONDS = 1.0


def timeout_limit(
    seconds: float, use_signals: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a call take at most `seconds`, then raise `TimeoutError`.

    By default the call runs in a forked child, from any thread; at the limit the child and the
    processes it started are killed, whatever they were doing. With `use_signals` the call stays in
    this process and `SIGALRM` interrupts it: only in the main thread, and only between Python
    instructions, so one long call into C code delays it.
    """
    if seconds <= 0:
        raise ValueError(f"timeout_limit needs a positive number of seconds; got {seconds}")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def limited(*args: P.args, **kwargs: P.kwargs) -> R:
            call = functools.partial(function, *args, **kwargs)
            name = function.__qualname__
            if use_signals:
                with alarm(seconds, name):
                    return call()
            return call_in_child(call, seconds, name)

        return limited

    return decorate


@contextmanager
def alarm(seconds: float, name: str) -> Iterator[None]:
    """Raise `TimeoutError` after `seconds`; an alarm that was set before still rings on time."""
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            f"timeout_limit(use_signals=True) on {name} works only in the main thread; "
            "leave use_signals out to run the call in a child process"
        )

    def expire(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(_expired(name, seconds))

    outer_seconds, interval = signal.getitimer(signal.ITIMER_REAL)
    if 0 < outer_seconds <= seconds:  # somebody else's alarm rings first; leave it to them
        yield
        return
    start = time.monotonic()
    handler = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if outer_seconds:
            left = outer_seconds - (time.monotonic() - start)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-6), interval)


def call_in_child(call: Callable[[], R], seconds: float, name: str) -> R:
    """Run `call` in a fork of this process and hand back what it returned or raised."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(call, sender), name=f"timeout_limit:{name}")
    child.start()
    sender.close()  # the child's copy is now the only one, so its death ends the pipe
    try:
        if not receiver.poll(seconds):
            raise TimeoutError(_expired(name, seconds))
        succeeded, outcome = receiver.recv()
        error = None if succeeded else _received_error(receiver, name, outcome)
        child.join(_EXIT_SECONDS)  # lets it flush what it printed
    except EOFError:
        child.join(_EXIT_SECONDS)
        raise RuntimeError(
            f"the process running {name} died without an answer (exit code {child.exitcode})"
        ) from None
    finally:
        _kill_family(child)
        receiver.close()
    if error is not None:
        raise error from RuntimeError(outcome)
    return outcome


def _answer(call: Callable[[], Any], sender: Any) -> None:
    os.setsid()  # a group of its own, so that processes it starts die with it
    try:
        sender.send((True, call()))
    except BaseException as error:
        sender.send((False, traceback.format_exc()))
        sender.send(error)
        raise SystemExit(1) from error


def _received_error(receiver: Any, name: str, text: str) -> BaseException:
    """The exception itself; one that does not survive the way is described instead."""
    try:
        return receiver.recv()
    except Exception as problem:
        raise RuntimeError(
            f"{name} raised something that cannot be sent between processes:\n{text}"
        ) from problem


def _kill_family(child: BaseProcess) -> None:
    assert child.pid is not None
    for kill in (os.killpg, os.kill):  # the group does not exist yet if the child just started
        with suppress(ProcessLookupError):
            kill(child.pid, signal.SIGKILL)
    child.join(_EXIT_SECONDS)
    child.close()


def _expired(name: str, seconds: float) -> str:
    return f"{name} took longer than {seconds} seconds"
