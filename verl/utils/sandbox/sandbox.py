"""Run a Python program that somebody else wrote: without network, files, keys, or time to spare.

`Sandbox.run` starts one supervisor process (`jail`), feeds the program and collects what it wrote.
The program sees input and a file system with an interpreter and a scratch directory:

    /python      this interpreter and its standard library, without installed packages
    /packages    the packages asked for
    /usr/lib     shared libraries of the system

Paths inside say nothing about paths outside. The program knows nothing of what is expected of it,
and only bytes come back; whether those are right is decided by the caller, in the caller's process.
Calls may come from any number of threads.
"""

import asyncio
import fcntl
import functools
import json
import os
import select
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from verl.utils.environment import variable
from verl.utils.sandbox.jail.namespaces import SCRATCH, Spec

DEFAULT_PACKAGES = ("numpy",)
"""Packages that programs may import, where they are installed."""


MAX_PROGRAM_BYTES = 1 << 20
_OVERHEAD_SECONDS = 30.0  # to build the sandbox and to take it down, on a machine under load
_FOLDER = str(Path(__file__).parent)
START = f"import sys; sys.path.insert(0, {_FOLDER!r}); from jail.supervisor import main; main()"
Status = Literal["finished", "failed", "timeout", "memory_limit", "output_limit"]
_CAUSES: dict[str, Status] = {
    "timeout": "timeout",
    "memory": "memory_limit",
    "stopped": "output_limit",
}


_SELF_TEST = """
import errno, json, os, socket
network = "connected"
try:
    socket.create_connection(("192.0.2.1", 80), timeout=1)
except OSError as error:
    network = errno.errorcode.get(error.errno, str(error))
children, (wait, release) = 0, os.pipe()
try:
    while children < 64:
        if os.fork() == 0:
            os.close(release)
            os.read(wait, 1)
            os._exit(0)
        children += 1
except BlockingIOError:
    pass
print(json.dumps({"network": network, "root": os.listdir("/"), "children": children}))
"""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Hard bounds of one run, for the program and everything it starts together."""

    timeout_seconds: float = 10.0
    """Wall-clock time from the moment the program starts."""
    memory_mb: int = 1024
    """Address space of each process, and resident memory of all of them together."""
    output_bytes: int = 64 * 1024
    """Of standard output and of standard error each; the program is stopped when it writes more."""
    scratch_mb: int = 64
    """The directory it may write to, kept in memory."""
    max_processes: int = 32
    """Processes and threads, the sandbox's own two or three included."""
    max_open_files: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"Limits.{name} is {value}; it must be positive")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """`stdout` and `stderr` hold at most `Limits.output_bytes`, cut at the end."""

    status: Status
    stdout: bytes
    stderr: bytes
    exit_code: int
    """Exit code; 128 + the signal if a signal ended the program."""
    duration_seconds: float

    @property
    def is_finished(self) -> bool:
        """It ended by itself with exit code 0."""
        return self.status == "finished"


class SandboxError(RuntimeError):
    """The sandbox failed; nothing is known about the program."""


class SandboxUnavailable(SandboxError):
    """This machine does not let us build a sandbox. Code is then not run at all."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"no sandbox on this machine: {reason}. Model-written code is not run without one. "
            "It needs Linux 5.14 or newer with user namespaces (in a container: --security-opt "
            "seccomp=unconfined --security-opt apparmor=unconfined, or --privileged; on Ubuntu "
            "24.04: sysctl kernel.apparmor_restrict_unprivileged_userns=0); or give the address "
            "of a Sandbox Fusion service in reward_model.sandbox_fusion.url"
        )


Mount = tuple[str, str]


@dataclass(frozen=True)
class View:
    mounts: list[Mount]
    """(path outside, path inside)"""
    links: list[tuple[str, str]]
    """(target, path inside)"""
    hidden: list[str]
    """Directories inside that look empty."""


def view_of_interpreter(packages: Sequence[str]) -> View:
    mounts = [*_interpreter(), *_system_libraries()]
    for package in packages:
        mounts += _package(package)
    standard_library = Path(os.__file__).parent
    hidden = [
        f"/python/lib/{_NAME}/{name}"
        for name in ("site-packages", "dist-packages")
        if (standard_library / name).is_dir()
    ]
    return View(mounts, list(_system_links()), hidden)


class Sandbox:
    def __init__(
        self, limits: Limits | None = None, *, packages: Sequence[str] = DEFAULT_PACKAGES
    ) -> None:
        self.limits = limits or Limits()
        self.packages = tuple(packages)

    def run(
        self,
        program: str,
        stdin: bytes | int = b"",
        *,
        limits: Limits | None = None,
        stdout: int | None = None,
    ) -> RunResult:
        """Run the text of a Python program. `stdin` and `stdout` may be file descriptors, which
        the program then has itself; what it writes to such a `stdout` is not collected.

        Raises `SandboxUnavailable` if this machine cannot isolate the program, and `SandboxError`
        if the sandbox failed; both say nothing about the program.
        """
        check_available()
        return self._run(program, stdin, limits or self.limits, stdout)

    async def run_async(self, program: str, stdin: bytes = b"") -> RunResult:
        """`run` on a thread of the event loop's executor; it ends by its own deadline."""
        return await asyncio.to_thread(self.run, program, stdin)

    def _run(
        self, program: str, stdin: bytes | int, limits: Limits, stdout: int | None
    ) -> RunResult:
        if len(program) > MAX_PROGRAM_BYTES:
            error = f"the program has more than {MAX_PROGRAM_BYTES} characters".encode()
            return RunResult(
                status="failed", stdout=b"", stderr=error, exit_code=1, duration_seconds=0.0
            )
        with ExitStack() as resources:
            stdin_fd = stdin if isinstance(stdin, int) else sealed_file(stdin, resources)
            status, status_end = open_pipe(resources)
            spec = self._spec(program, limits, stdin_fd=stdin_fd, status_fd=status_end)
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", START],
                stdin=sealed_file(spec.to_json().encode(), resources),
                stdout=subprocess.PIPE if stdout is None else stdout,
                stderr=subprocess.PIPE,
                pass_fds=(stdin_fd, status_end),
                env=supervisor_environment(),
                bufsize=0,
            )
            resources.enter_context(process)
            try:
                out, err = collect(process, limits, overhead_seconds=_OVERHEAD_SECONDS)
            finally:
                process.kill()  # no effect on one that has ended
                process.wait(_OVERHEAD_SECONDS)
            return _result(read_now(status), out, err, limits)

    def _spec(self, program: str, limits: Limits, *, stdin_fd: int, status_fd: int) -> Spec:
        view = _view(self.packages)
        return Spec(
            arguments=[PYTHON, f"{SCRATCH}/main.py"],
            environment=ENVIRONMENT,
            files={"main.py": program},
            mounts=view.mounts,
            links=view.links,
            hidden=view.hidden,
            stdin_fd=stdin_fd,
            status_fd=status_fd,
            timeout_seconds=limits.timeout_seconds,
            memory_bytes=limits.memory_mb * 2**20,
            scratch_bytes=limits.scratch_mb * 2**20,
            max_processes=limits.max_processes,
            max_open_files=limits.max_open_files,
            has_loopback=False,
        )


@functools.cache
def check_available() -> None:
    """Try the walls once per process: what cannot be shown to hold here is not used here."""
    if sys.platform != "linux":
        raise SandboxUnavailable(f"it is built from Linux namespaces, and this is {sys.platform}")
    limits = Limits(max_processes=8, memory_mb=256)
    result = Sandbox(packages=())._run(_SELF_TEST, b"", limits, None)
    if not result.is_finished:
        raise SandboxError(f"the sandbox's test of itself did not finish: {result}")
    found = json.loads(result.stdout)
    if found["network"] != "ENETUNREACH":
        raise SandboxUnavailable(f"the network is not cut off (connect gave {found['network']})")
    if not set(found["root"]) <= {"dev", "lib", "lib64", "packages", "python", "tmp", "usr"}:
        raise SandboxUnavailable(f"files of the host can be seen: {found['root']}")
    if found["children"] >= limits.max_processes:
        raise SandboxUnavailable(
            f"the kernel does not limit the number of processes ({found['children']} were started "
            f"where {limits.max_processes} are allowed; Linux 5.14 or newer is needed)"
        )


@functools.cache
def _view(packages: tuple[str, ...]) -> View:
    return view_of_interpreter(packages)


def supervisor_environment() -> dict[str, str]:
    """Where the interpreter itself is found through this variable, it is needed to start it."""
    library_path = variable("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": library_path} if library_path else {}


def _result(verdict_json: bytes, out: bytes, err: bytes, limits: Limits) -> RunResult:
    if not verdict_json:
        raise SandboxError(f"the sandbox's supervisor died: {err[-2000:].decode(errors='replace')}")
    verdict: dict[str, Any] = json.loads(verdict_json)
    if verdict["cause"] == "setup":
        raise SandboxUnavailable(verdict["reason"])
    finished = "finished" if verdict["exit_code"] == 0 else "failed"
    is_too_long = max(len(out), len(err)) > limits.output_bytes
    return RunResult(
        status="output_limit" if is_too_long else _CAUSES.get(verdict["cause"], finished),
        stdout=out[: limits.output_bytes],
        stderr=err[: limits.output_bytes],
        exit_code=verdict["exit_code"],
        duration_seconds=verdict["seconds"],
    )


def sealed_file(content: bytes, resources: ExitStack) -> int:
    """A file in memory that nobody can change, rewound; no writer has to wait for its reader."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    resources.callback(os.close, descriptor)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def open_pipe(resources: ExitStack) -> tuple[int, int]:
    reader, writer = os.pipe()
    resources.callback(os.close, reader)
    resources.callback(os.close, writer)
    return reader, writer


def collect(
    process: "subprocess.Popen[bytes]", limits: Limits, *, overhead_seconds: float
) -> tuple[bytes, bytes]:
    """Both outputs, at most one byte longer than allowed; that byte stops the program.

    The end of the process is the end, not the end of the pipes: a fork elsewhere in this program
    may hold a copy of them.
    """
    streams = process.stdout, process.stderr
    outputs = {stream.fileno(): bytearray() for stream in streams if stream is not None}
    deadline = time.monotonic() + limits.timeout_seconds + overhead_seconds
    ended = os.pidfd_open(process.pid)
    poller = select.poll()
    for descriptor in (ended, *outputs):
        poller.register(descriptor, select.POLLIN)
    try:
        while (ready := [descriptor for descriptor, _ in poller.poll(1000)]) != [ended]:
            for descriptor in set(ready) - {ended}:
                chunk = os.read(descriptor, 1 << 16)
                kept = outputs[descriptor]
                kept += chunk[: limits.output_bytes + 1 - len(kept)]
                if len(kept) > limits.output_bytes:
                    process.terminate()
                if not chunk:
                    poller.unregister(descriptor)
            if time.monotonic() > deadline:
                raise SandboxError("the sandbox's supervisor did not end in time")
    finally:
        os.close(ended)
    out, err = (bytes(outputs[stream.fileno()]) if stream else b"" for stream in streams)
    return out, err


def read_now(descriptor: int) -> bytes:
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""


_NAME = f"python{sys.version_info.major}.{sys.version_info.minor}"
_SYSTEM_FOLDERS = ("/lib", "/usr/lib", "/lib64", "/usr/lib64")
PYTHON = f"/python/bin/{_NAME}"
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "LD_LIBRARY_PATH": "/python/lib",
    "MALLOC_ARENA_MAX": "2",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": "/packages",
}
"""The whole environment of a program; nothing is inherited."""


def _interpreter() -> Iterator[Mount]:
    """An interpreter with a folder of its own may keep more libraries beside its standard library;
    one of the system finds them among the system's."""
    standard_library = os.path.realpath(os.path.dirname(os.__file__))
    folder = os.path.dirname(standard_library)
    yield os.path.realpath(sys.executable), PYTHON
    if folder not in _SYSTEM_FOLDERS:
        yield folder, "/python/lib"
        return
    yield standard_library, f"/python/lib/{_NAME}"
    extensions = sysconfig.get_config_var("DESTSHARED") or ""
    if os.path.isdir(extensions) and os.path.dirname(extensions) != standard_library:
        yield os.path.realpath(extensions), f"/python/lib64/{_NAME}/lib-dynload"


def _system_libraries() -> Iterator[Mount]:
    """Where libraries are sorted by architecture, only those of ours, and the loader."""
    architecture = sysconfig.get_config_var("MULTIARCH") or ""
    for folder in map(Path, _SYSTEM_FOLDERS):
        if folder.is_symlink() or not folder.is_dir():
            continue
        ours = folder / architecture if (folder / architecture).is_dir() else folder
        yield str(ours), str(ours)
        if ours != folder:
            for loader in folder.glob("ld-*.so*"):
                yield str(loader.resolve()), str(loader)


def _system_links() -> Iterator[tuple[str, str]]:
    for folder in ("/lib", "/lib64"):
        if os.path.islink(folder):
            yield os.readlink(folder), folder


def _package(name: str) -> Iterator[Mount]:
    """A package and the shared libraries its wheel brings along; nothing if it is not installed."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return
    place = Path(spec.origin)
    place = place.parent if spec.submodule_search_locations else place
    for path in (place, place.with_name(f"{name}.libs")):
        if path.exists():
            yield str(path.resolve()), f"/packages/{path.name}"
