"""The process that stands between `Sandbox` and the program: it keeps time and counts memory.

    waits for                    and then
    init ended                   reports its exit status
    the deadline                 kills init, and with it everything inside
    memory of all processes      kills init
    SIGTERM from `Sandbox`       kills init (the output limit was reached)
    its parent died              is killed by the kernel; init follows it

The clock starts when the program does. The verdict is one JSON object on `status_fd`.

init, pid 1 of the sandbox, builds the file system, gives up its privileges, starts the program and
waits. It ignores what the program sends it; when it ends, the kernel kills everything left in the
namespace.
"""

import json
import os
import resource
import select
import signal
import sys
import time

from . import kernel, namespaces
from .namespaces import Spec

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
    namespaces.enter_user_namespace(_NAMESPACES)
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


SETUP_FAILED = 250
"""Exit status of init when the program was never started; the reason is on the pipe."""

_STACK_BYTES = 16 * 2**20


def run_init(spec: Spec, report: int, supervisor_alive: int) -> int:
    """The exit status of the program; of one that died by a signal, 128 + the signal.

    Writes "ready" to `report` when the program is about to start, or why it cannot.
    """
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
        namespaces.build_and_enter(spec)
        if spec.has_loopback:
            kernel.raise_loopback()
        namespaces.become_program()
        kernel.hide_from_debuggers()
        kernel.die_with_parent(signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # Only now does the supervisor's death reach us: one that died before is noticed here.
        os.write(report, b"ready")
        if not os.read(supervisor_alive, 1):
            return SETUP_FAILED
        program = os.fork()
    except OSError as error:
        os.write(report, str(error).encode())
        return SETUP_FAILED
    if program == 0:
        start_program(spec, report)
    os.close(report)
    return _wait_for(program)


def start_program(spec: Spec, report: int) -> None:
    """Never returns."""
    try:
        os.setsid()
        os.dup2(spec.stdin_fd, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        set_limits(spec)
        kernel.install_filter(kernel.build_filter(os.uname().machine))
        os.execve(spec.arguments[0], spec.arguments, spec.environment)
    except (OSError, ValueError) as error:
        os.write(report, f"starting {spec.arguments[0]}: {error}".encode())
    finally:
        os._exit(SETUP_FAILED)


def set_limits(spec: Spec) -> None:
    """Per process, except the number of processes; the supervisor watches the memory of all."""
    seconds = int(spec.timeout_seconds) + 2
    limits = {
        resource.RLIMIT_AS: spec.memory_bytes,
        resource.RLIMIT_STACK: min(_STACK_BYTES, spec.memory_bytes),
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: spec.scratch_bytes,
        resource.RLIMIT_NOFILE: spec.max_open_files,
        resource.RLIMIT_NPROC: spec.max_processes,
        resource.RLIMIT_CORE: 1,  # 0 would not keep a dump from a program that collects them
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 64,
    }
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _wait_for(program: int) -> int:
    while True:  # orphans of the program are ours; the supervisor keeps the deadline
        process, status = os.waitpid(-1, 0)
        if process == program:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
