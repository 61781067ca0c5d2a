"""What may be asked of the sandbox, and what it answers."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["finished", "failed", "timeout", "memory_limit", "output_limit"]


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
    """Of a program that a signal ended, 128 + the signal."""
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
