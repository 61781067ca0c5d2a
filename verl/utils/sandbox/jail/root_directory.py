"""The file system a sandboxed program sees: an empty one, with the few things it needs put in.

Everything is mounted into a new tmpfs, which becomes `/`; the host's tree is then detached. What
was not put in does not exist inside, so there is no list of secret paths to keep up to date.
"""

import os

from . import kernel
from .spec import SCRATCH, Spec

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_HOST = "/host"
_ROOT_OPTIONS = "size=1m,nr_inodes=1024,mode=0755"
_MAX_FILES = 4096


def build_and_enter(spec: Spec) -> None:
    """In a mount namespace of its own; afterwards only the new tree can be reached."""
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, _ROOT_OPTIONS)
    os.mkdir(f"/tmp{_HOST}")
    kernel.enter_root("/tmp", f"/tmp{_HOST}")
    for outside, inside in spec.mounts:
        _bind(outside, inside)
        kernel.make_read_only(inside, recursive=True)
    for inside in spec.hidden:
        kernel.mount("tmpfs", inside, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, _ROOT_OPTIONS)
        kernel.make_read_only(inside, recursive=False)
    for device in DEVICES:
        _bind(device, device)
    for text, inside in spec.links:
        os.symlink(text, inside)
    kernel.detach(_HOST)
    os.rmdir(_HOST)
    _make_scratch(spec)
    kernel.make_read_only("/", recursive=False)
    os.chdir(SCRATCH)


def _bind(outside: str, inside: str) -> None:
    source = _HOST + outside
    os.makedirs(os.path.dirname(inside), exist_ok=True)
    if os.path.isdir(source):
        os.makedirs(inside, exist_ok=True)
    else:
        os.close(os.open(inside, os.O_CREAT))
    kernel.mount(source, inside, "", kernel.MS_BIND | kernel.MS_REC)


def _make_scratch(spec: Spec) -> None:
    os.mkdir(SCRATCH)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    options = f"size={spec.scratch_bytes},nr_inodes={_MAX_FILES},mode=1777"
    kernel.mount("tmpfs", SCRATCH, "tmpfs", flags, options)
    for name, text in spec.files.items():
        with open(f"{SCRATCH}/{name}", "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
