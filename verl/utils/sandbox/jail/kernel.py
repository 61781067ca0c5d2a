"""System calls: those that Python has no function for, and those that a program may not make.

Each function raises an `OSError` that says what was tried. Namespaces and limits already keep the
program from the host. The filter takes away what would let it build namespaces of its own, look
into other processes, hold memory that no limit counts, or reach rarely used corners of the kernel.
A refused call fails with EPERM.
"""

import ctypes
import errno
import os
import struct

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

_AF_INET = 2
_SOCK_DGRAM = 2
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1

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


def raise_loopback() -> None:
    """A network namespace begins with everything down; afterwards it reaches itself, no more."""
    control = _libc.socket(_AF_INET, _SOCK_DGRAM, 0)
    _check(control, "opening a socket")
    try:
        request = struct.pack("16sH22x", b"lo", _IFF_UP)
        _check(_libc.ioctl(control, ctypes.c_ulong(_SIOCSIFFLAGS), request), "raising loopback")
    finally:
        os.close(control)


def _check(status: int, what: str) -> None:
    if status < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# name: (x86_64, aarch64)
REFUSED_CALLS = {
    # namespaces, mounts, other roots
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # memory outside the address-space limit
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # keys, and corners of the kernel
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
    "syslog": (103, 116),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "swapon": (167, 224),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
}
SOCKET = (41, 198)
SOCKET_FAMILIES = (1, 2, 10)  # unix, internet: those that a network namespace contains
CLONE = (56, 220)
CLONE3 = (435, 435)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column in the tables above, and the kernel's own number for the architecture."""

_NAMESPACE_FLAGS = 0x7E020000
_X32_CALLS = 0x40000000

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_CALL_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def build_filter(machine: str) -> bytes:
    """The filter as classic BPF.

    Sockets of families that network namespaces do not contain (to the hypervisor, to the kernel's
    cryptography) cannot be made. `clone` is refused only where it asks for a new namespace.
    `clone3` hides its flags behind a pointer, so it does not exist here and libraries fall back
    to `clone`.
    """
    if machine not in MACHINES:
        raise ValueError(
            f"the sandbox has no system call table for {machine}; it knows {', '.join(MACHINES)}"
        )
    column, architecture = MACHINES[machine]
    refuse = _step(_RETURN, _ERROR | errno.EPERM)
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_IF_EQUAL, architecture, skip_if_true=1),
        _step(_RETURN, _KILL),
        _step(_LOAD, _CALL_NUMBER),
    ]
    if machine == "x86_64":
        steps += [_step(_IF_AT_LEAST, _X32_CALLS, skip_if_false=1), refuse]
    for numbers in REFUSED_CALLS.values():
        steps += [_step(_IF_EQUAL, numbers[column], skip_if_false=1), refuse]
    steps += [
        _step(_IF_EQUAL, CLONE3[column], skip_if_false=1),
        _step(_RETURN, _ERROR | errno.ENOSYS),
        _step(_IF_EQUAL, SOCKET[column], skip_if_false=6),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_IF_EQUAL, SOCKET_FAMILIES[0], skip_if_true=2),
        _step(_IF_EQUAL, SOCKET_FAMILIES[1], skip_if_true=1),
        _step(_IF_EQUAL, SOCKET_FAMILIES[2], skip_if_false=1),
        _step(_RETURN, _ALLOW),
        _step(_RETURN, _ERROR | errno.EAFNOSUPPORT),
        _step(_IF_EQUAL, CLONE[column], skip_if_false=3),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_IF_ANY_BIT, _NAMESPACE_FLAGS, skip_if_false=1),
        refuse,
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(steps)


def _step(code: int, value: int, *, skip_if_true: int = 0, skip_if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, skip_if_true, skip_if_false, value)
