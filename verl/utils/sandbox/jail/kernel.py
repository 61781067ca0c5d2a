"""System calls that Python has no function for, each raising `OSError` that says what was tried."""

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_SYS_MOUNT_SETATTR = 442  # the same number on every architecture
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY_NOSUID_NODEV = 1 | 2 | 4
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "creating namespaces")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    status = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _check(status, f"mounting {source} on {target}")


def make_read_only(target: str, *, recursive: bool) -> None:
    """Also without set-uid programs and device files."""
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY_NOSUID_NODEV, 0, 0, 0)
    status = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(target.encode()),
        ctypes.c_uint(_AT_RECURSIVE if recursive else 0),
        attributes,
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _check(status, f"making {target} read-only")


def enter_root(new_root: str, place_of_old_root: str) -> None:
    """`new_root` becomes `/`; what was `/` is found at `place_of_old_root`."""
    number = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
    status = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_char_p(new_root.encode()),
        ctypes.c_char_p(place_of_old_root.encode()),
    )
    _check(status, f"making {new_root} the root directory")
    os.chdir("/")


def detach(target: str) -> None:
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"unmounting {target}")


def die_with_parent(signal_number: int) -> None:
    """Cleared by every change of credentials, so ask for it after the last one."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def hide_from_debuggers() -> None:
    _prctl(_PR_SET_DUMPABLE, 0)


def forbid_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, nothing), "dropping capabilities")


def install_filter(instructions: bytes) -> None:
    """Filter system calls by a classic BPF program; needs `forbid_new_privileges` first."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]

    program = Program(len(instructions) // 8, instructions)
    status = _libc.prctl(
        _PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(program), 0, 0
    )
    _check(status, "installing the system call filter")


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl({option}, {value})")


def _check(status: int, what: str) -> None:
    if status < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
