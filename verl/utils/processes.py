"""Processes: what another one is doing, who ends with whom, and forks that must not come back.

A worker `announce`s itself once: its pid, its host, and a file into which the interpreter writes
its stack when SIGUSR1 arrives (this works in the middle of a C call and without the GIL). The file
has no name; whoever asks reads it through `/proc/<pid>/fd`, so nothing is left behind.

A process that calls `adopt_orphans` becomes the parent of all that its descendants leave behind,
daemons with a session of their own included, so `end_descendants` finds every one of them.

Linux only; elsewhere the probes say that they cannot tell, and descendants are not found.
"""

import ctypes
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""`python -c` of it, with further arguments of the interpreter, is a program that is killed when
the thread that started it ends: 1 is PR_SET_PDEATHSIG, 9 is SIGKILL, and both stay in force."""
END_SECONDS = 5.0
LOOK_SECONDS = 0.002

_dump_file: IO[str] | None = None  # kept open for the life of the process


@dataclass(frozen=True)
class ProcessAddress:
    pid: int
    host: str
    dump_descriptor: int | None = None


def announce(*, all_threads: bool = False) -> ProcessAddress:
    """Called in the worker: from now on its stack can be asked for."""
    global _dump_file
    if sys.platform != "linux":
        return ProcessAddress(os.getpid(), socket.gethostname())
    if _dump_file is None:
        _dump_file = tempfile.TemporaryFile("w+")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, file=_dump_file, all_threads=all_threads)
    return ProcessAddress(os.getpid(), socket.gethostname(), _dump_file.fileno())


def is_stopped(pid: int) -> bool:
    """Whether a process exists but was stopped by a signal (SIGSTOP, SIGTSTP)."""
    return _state(pid) == "T"


def stack_of(address: ProcessAddress, timeout_seconds: float = 2.0) -> str:
    """The Python stack of a process on this machine, or a sentence why there is none."""
    state = _state(address.pid)
    if state == "T":
        return "stopped by a signal (SIGSTOP or SIGTSTP); `kill -CONT` would continue it"
    if state in ("", "Z", "X") or address.dump_descriptor is None:
        return "its stack is not available"
    file = Path(f"/proc/{address.pid}/fd/{address.dump_descriptor}")
    try:
        written = file.stat().st_size
        os.kill(address.pid, signal.SIGUSR1)
        _wait_until_written(file, written, timeout_seconds)
        with file.open() as dump:
            dump.seek(written)
            return dump.read().strip() or f"no stack within {timeout_seconds:g} s (state {state})"
    except OSError as error:
        return f"its stack is not available ({error})"


def _wait_until_written(file: Path, size: int, timeout_seconds: float) -> None:
    """Wait until the file has grown beyond `size` and has stopped growing."""
    give_up = time.monotonic() + timeout_seconds
    previous = size
    while time.monotonic() < give_up:
        time.sleep(0.05)
        current = file.stat().st_size
        if current > size and current == previous:
            return
        previous = current


def _state(pid: int) -> str:
    """The letter of /proc/<pid>/stat, or "" where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


# ---- who ends with whom --------------------------------------------------------------------------


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this signal when the thread that started this process ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_descendants() -> None:
    """Kill and collect every process below this one, which has adopted its orphans.

    It is over when the kernel says that no child is left. A process that cannot be killed (another
    user's, or inside the kernel) is left after `END_SECONDS`.
    """
    give_up = time.monotonic() + END_SECONDS
    while has_children() and time.monotonic() < give_up:
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_SECONDS)


def reap(process: "subprocess.Popen[Any]", timeout_seconds: float) -> None:
    """Wait for a child that was told to end, and kill it if it does not."""
    try:
        process.wait(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=timeout_seconds)


def ending_of(pid: int, code: int | None, tail: Iterable[str]) -> str:
    """How a child ended, by its exit code (None: it runs), and the last lines that it wrote."""
    if code is None:
        how = f"process {pid} runs"
    elif code < 0:
        hint = ", as the kernel does when memory runs out" if -code == signal.SIGKILL else ""
        how = f"process {pid} was ended by {signal.Signals(-code).name}{hint}"
    else:
        how = f"process {pid} ended with exit code {code}"
    lines = "\n".join(f"    {line}" for line in tail)
    return f"{how}; the last that it wrote:\n{lines}" if lines else f"{how} and wrote nothing"


def has_children() -> bool:
    """Collects those that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def descendants(root: int) -> list[int]:
    """Process ids of all that are below `root` now; zombies too."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        with suppress(OSError):  # it ended as we looked
            if entry.isdigit():
                parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry))
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def supervised(command: Sequence[str], *, max_line_bytes: int, max_stderr_bytes: int) -> list[str]:
    """A command line that runs `command` and ends with the thread that starts it, by whatever it
    ends, together with all that it has started.

    A line of output that is too long ends it too. Of what it writes to stderr, a file, only the
    latest is kept.
    """
    boot = (
        "import sys; sys.path.insert(0, sys.argv[1]); "
        "from verl.utils.processes import supervise; "
        "sys.exit(supervise(sys.argv[5:], *map(int, sys.argv[2:5])))"
    )
    root = str(Path(__file__).resolve().parents[2])
    limits = (os.getpid(), max_line_bytes, max_stderr_bytes)
    return [sys.executable, "-I", "-c", boot, root, *map(str, limits), *command]


def supervise(command: list[str], parent: int, max_line_bytes: int, max_stderr_bytes: int) -> int:
    """Run a command below this process, which does nothing else; its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    adopt_orphans()
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the kernel was told
        return 1
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        return 127
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the end of stdin is for the command alone
    assert process.stdout is not None
    assert process.stderr is not None
    pipes = (process.stdout.fileno(), process.stderr.fileno())
    relays = [
        threading.Thread(target=_relay_lines, args=(process, pipes[0], max_line_bytes)),
        threading.Thread(target=_keep_latest, args=(pipes[1], max_stderr_bytes)),
    ]
    for relay in relays:
        relay.daemon = True
        relay.start()
    try:
        _, status = os.waitpid(process.pid, 0)
        for relay in relays:
            relay.join(0.5)  # an orphan may hold the pipe open
        return os.waitstatus_to_exitcode(status) & 0xFF
    finally:
        end_descendants()


def _relay_lines(process: "subprocess.Popen[bytes]", source: int, max_line_bytes: int) -> None:
    length = 0
    while chunk := os.read(source, 1 << 16):
        head, newline, tail = chunk.rpartition(b"\n")
        length = len(tail) if newline else length + len(chunk)
        if length > max_line_bytes or max(map(len, head.split(b"\n"))) > max_line_bytes:
            os.write(2, f"a line of output has more than {max_line_bytes} bytes\n".encode())
            process.kill()
            return
        try:
            while chunk:
                chunk = chunk[os.write(1, chunk) :]
        except OSError:  # nobody reads any more
            process.kill()
            return


def _keep_latest(source: int, max_bytes: int) -> None:
    while chunk := os.read(source, 1 << 16):
        with suppress(OSError):  # not a file: it cannot be cut
            if os.lseek(2, 0, os.SEEK_CUR) > max_bytes:
                os.ftruncate(2, 0)
                os.lseek(2, 0, os.SEEK_SET)
        os.write(2, chunk)


@contextmanager
def forks_end_here() -> Iterator[None]:
    """A fork that the code inside makes, and that comes back through our frames, ends here.

    It is a copy of a process of ours in the middle of a call: it must not answer that call, nor run
    the exit handlers of what it is a copy of.
    """
    owner, code = os.getpid(), 1
    try:
        yield
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        raise
    except BaseException:
        if os.getpid() != owner:
            traceback.print_exc()
        raise
    finally:
        if os.getpid() != owner:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):  # closed
                    stream.flush()
            os._exit(code & 0xFF)


def num_oom_kills() -> int:
    """How many processes of this machine the kernel has killed because memory ran out."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:  # not Linux
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def resident_gib() -> float:
    """Memory of this process that is in use now."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:  # not Linux
        return 0.0
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**30
