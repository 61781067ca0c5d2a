"""pid 1 of the sandbox, and the program it starts.

init builds the file system, gives up its privileges, starts the program and waits. It ignores what
the program sends it; when it ends, the kernel kills everything left in the namespace.
"""

import os
import resource
import signal

from . import call_filter, identity, kernel, root_directory
from .spec import Spec

SETUP_FAILED = 250
"""Exit status of init when the program was never started; the reason is on the pipe."""

_STACK_BYTES = 16 * 2**20


def run_init(spec: Spec, report: int, supervisor_alive: int) -> int:
    """The exit status of the program; of one that died by a signal, 128 + the signal.

    Writes "ready" to `report` when the program is about to start, or why it cannot.
    """
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
        root_directory.build_and_enter(spec)
        identity.become_program()
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
        kernel.install_filter(call_filter.build_filter(os.uname().machine))
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
