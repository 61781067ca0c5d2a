"""Run a Python program that somebody else wrote: without network, files, keys, or time to spare.

`Sandbox.run` starts one supervisor process (`jail`), feeds the program and collects what it wrote.
The program sees a file system with an interpreter and a scratch directory, and input; it knows
nothing of what is expected of it, and only bytes come back. Whether those are right is decided by
the caller, in the caller's process. Calls may come from any number of threads.
"""

import asyncio
import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from verl.utils.environment import variable
from verl.utils.sandbox.interpreter import ENVIRONMENT, PYTHON, View, view_of_interpreter
from verl.utils.sandbox.jail.spec import SCRATCH, Spec
from verl.utils.sandbox.results import Limits, RunResult, SandboxError, SandboxUnavailable, Status
from verl.utils.sandbox.streams import collect, open_pipe, read_now, sealed_file

DEFAULT_PACKAGES = ("numpy",)
"""Packages that programs may import, where they are installed."""

MAX_PROGRAM_BYTES = 1 << 20
_OVERHEAD_SECONDS = 30.0  # to build the sandbox and to take it down, on a machine under load
_FOLDER = str(Path(__file__).parent)
_START = f"import sys; sys.path.insert(0, {_FOLDER!r}); from jail.supervisor import main; main()"
_CAUSES: dict[str, Status] = {
    "timeout": "timeout",
    "memory": "memory_limit",
    "stopped": "output_limit",
}


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
                [sys.executable, "-I", "-S", "-c", _START],
                stdin=sealed_file(spec.to_json().encode(), resources),
                stdout=subprocess.PIPE if stdout is None else stdout,
                stderr=subprocess.PIPE,
                pass_fds=(stdin_fd, status_end),
                env=_supervisor_environment(),
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


@functools.cache
def _view(packages: tuple[str, ...]) -> View:
    return view_of_interpreter(packages)


def _supervisor_environment() -> dict[str, str]:
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
