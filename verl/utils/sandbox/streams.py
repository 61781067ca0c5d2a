"""How bytes get into a sandbox and out of it: files in memory, pipes, and a limit on both."""

import fcntl
import os
import select
import subprocess
import time
from contextlib import ExitStack

from verl.utils.sandbox.results import Limits, SandboxError


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
