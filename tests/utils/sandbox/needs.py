"""Whether the kernel gives namespaces at all; nothing else excuses a test of the sandbox."""

import functools
import subprocess
import sys

import pytest

TRY = """
from verl.utils.sandbox.jail import kernel
kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET)
kernel.unshare(kernel.CLONE_NEWNS)
kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
"""


def require_namespaces() -> None:
    if refusal := _refusal():
        pytest.skip(f"this machine refuses namespaces, so there is no sandbox to test: {refusal}")


@functools.cache
def _refusal() -> str:
    if sys.platform != "linux":
        return sys.platform
    tried = subprocess.run([sys.executable, "-c", TRY], capture_output=True, text=True, timeout=60)
    return tried.stderr.strip().rpartition("\n")[2] if tried.returncode else ""
