"""What a program is told (`Spec`) and what it sees: a user of its own, an empty file system.

The user namespace maps the inside user to an id outside: for root to `nobody`, because the kernel
does not limit the number of processes of root; for anybody else to their own id, the only one they
may map. Root also maps itself, to reach the interpreter's files while the file system is built.

Everything the program needs is mounted into a new tmpfs, which becomes `/`; the host's tree is then
detached. What was not put in does not exist inside, so there is no list of secret paths to keep up
to date.

A `Spec` is JSON between `Sandbox` and the supervisor it starts. The modules of this folder are
loaded for every run, so they use what the standard library loads quickly: no dataclasses, no
pathlib.
"""

import json
import os
from types import SimpleNamespace

from . import kernel

SCRATCH = "/tmp"
"""The only directory a program may write to; it starts there."""


class Spec(SimpleNamespace):
    arguments: list[str]
    """The command, as the inside sees it."""
    environment: dict[str, str]
    files: dict[str, str]
    """Text files in the scratch directory, by name."""
    mounts: list[tuple[str, str]]
    """(path outside, path inside), read-only."""
    links: list[tuple[str, str]]
    """(what the symbolic link says, path inside)."""
    hidden: list[str]
    """Directories inside to cover with an empty one."""
    stdin_fd: int
    status_fd: int
    """Where the supervisor writes its verdict, one JSON object."""
    timeout_seconds: float
    memory_bytes: int
    scratch_bytes: int
    max_processes: int
    max_open_files: int
    has_loopback: bool
    """Whether programs inside reach each other over 127.0.0.1; nothing outside in any case."""

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> "Spec":
        return cls(**json.loads(text))


PROGRAM_ID = 1000
_NOBODY = 65534


def enter_user_namespace(other_namespaces: int) -> None:
    """Create the namespaces; a helper that stays outside writes the maps, as only it may."""
    user, group = os.geteuid(), os.getegid()
    maps = id_map(user, _read("/proc/self/uid_map")), id_map(group, _read("/proc/self/gid_map"))
    ready, is_ready = os.pipe()
    parent = os.getpid()
    helper = os.fork()
    if helper == 0:
        os.close(is_ready)
        os._exit(_write_maps(parent, *maps) if os.read(ready, 1) else 1)
    kernel.unshare(kernel.CLONE_NEWUSER | other_namespaces)
    os.write(is_ready, b"1")
    os.close(is_ready)
    os.close(ready)
    _, status = os.waitpid(helper, 0)
    if status != 0:
        number = os.waitstatus_to_exitcode(status)
        raise OSError(number, f"mapping user {user} into the sandbox: {os.strerror(number)}")


def become_program() -> None:
    """Give up every privilege, for good."""
    if os.geteuid() != PROGRAM_ID:  # root, who may; other users are already mapped to it
        os.setgroups([])
        os.setresgid(PROGRAM_ID, PROGRAM_ID, PROGRAM_ID)
        os.setresuid(PROGRAM_ID, PROGRAM_ID, PROGRAM_ID)
    kernel.drop_capabilities()
    kernel.forbid_new_privileges()


def id_map(host_id: int, current_map: str) -> str:
    """The map to write, given the one this process lives under."""
    if host_id == 0 and _is_mapped(_NOBODY, current_map):
        return f"0 0 1\n{PROGRAM_ID} {_NOBODY} 1\n"
    return f"{PROGRAM_ID} {host_id} 1\n"


def _is_mapped(number: int, current_map: str) -> bool:
    extents = (line.split() for line in current_map.splitlines())
    return any(int(first) <= number < int(first) + int(count) for first, _outside, count in extents)


def _write_maps(process: int, user_map: str, group_map: str) -> int:
    """An exit status: 0, or the error number."""
    try:
        if os.geteuid() != 0:
            _write(f"/proc/{process}/setgroups", "deny")
        _write(f"/proc/{process}/uid_map", user_map)
        _write(f"/proc/{process}/gid_map", group_map)
    except OSError as error:
        return error.errno or 1
    return 0


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


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
