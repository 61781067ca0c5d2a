"""The process that stands between `Sandbox` and the program: it keeps time and counts memory.

    waits for                    and then
    init ended                   reports its exit status
    the deadline                 kills init, and with it everything inside
    memory of all processes      kills init
    SIGTERM from `Sandbox`       kills init (the output limit was reached)
    its parent died              is killed by the kernel; init follows it

The clock starts when the program does. The verdict is one JSON object on `status_fd`.
"""

import json
import os
import select
import signal
import sys
import time

from . import identity, kernel
from .program import SETUP_FAILED, run_init
from .spec import Spec

_LOOK_SECONDS = 0.05
_SETUP_SECONDS = 20.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_NAMESPACES = (
    kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)


def main() -> None:
    spec = Spec.from_json(sys.stdin.read())
    try:
        verdict = supervise(spec)
    except (OSError, ValueError) as error:
        verdict = {"cause": "setup", "reason": str(error)}
    os.write(spec.status_fd, json.dumps(verdict).encode())


def supervise(spec: Spec) -> dict[str, str | int | float]:
    for descriptor in (spec.stdin_fd, spec.status_fd):
        os.set_inheritable(descriptor, False)
    kernel.die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that called us
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD, signal.SIGTERM))
    identity.enter_user_namespace(_NAMESPACES)
    reports, report = os.pipe()
    supervisor_alive, alive = os.pipe()
    init = os.fork()
    if init == 0:
        os.close(alive)
        os.close(reports)
        os.close(spec.status_fd)
        os._exit(run_init(spec, report, supervisor_alive))
    os.close(report)
    os.close(supervisor_alive)
    try:
        _wait_until_ready(reports)
        os.write(alive, b"1")
        started = time.monotonic()
        cause, exit_code = _watch(init, spec, started + spec.timeout_seconds)
    except OSError:
        _kill(init)
        raise
    if exit_code == SETUP_FAILED and (reason := os.read(reports, 4096)):
        return {"cause": "setup", "reason": reason.decode()}
    return {"cause": cause, "exit_code": exit_code, "seconds": time.monotonic() - started}


def _wait_until_ready(reports: int) -> None:
    readable, _, _ = select.select([reports], [], [], _SETUP_SECONDS)
    text = os.read(reports, 4096) if readable else b"building the sandbox took too long"
    if text != b"ready":
        raise OSError(text.decode() or "the first process of the sandbox died")


def _watch(init: int, spec: Spec, deadline: float) -> tuple[str, int]:
    """Why the program ended, and its exit status."""
    while True:
        seconds = min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))
        received = signal.sigtimedwait((signal.SIGCHLD, signal.SIGTERM), seconds)
        process, status = os.waitpid(init, os.WNOHANG)
        if process:
            return "exit", os.waitstatus_to_exitcode(status)
        if received is not None and received.si_signo == signal.SIGTERM:
            return "stopped", _kill(init)
        if time.monotonic() >= deadline:
            return "timeout", _kill(init)
        if resident_bytes(init) > spec.memory_bytes:
            return "memory", _kill(init)


def _kill(init: int) -> int:
    """After this, nothing that ran in the sandbox exists: the kernel ends pid 1 last."""
    os.kill(init, signal.SIGKILL)
    os.waitpid(init, 0)
    return 128 + signal.SIGKILL


def resident_bytes(root: int) -> int:
    """Memory of all processes below one, which must be there itself; they may end as we look."""
    total, waiting = 0, _children(str(root))
    while waiting:
        process = waiting.pop()
        try:
            total += int(_words(f"/proc/{process}/statm")[1]) * _PAGE_BYTES
            waiting += _children(process)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def _children(process: str) -> list[str]:
    threads = os.listdir(f"/proc/{process}/task")
    return [child for t in threads for child in _words(f"/proc/{process}/task/{t}/children")]


def _words(path: str) -> list[str]:
    with open(path) as file:
        return file.read().split()
