"""A sandbox for programs that a model wrote. It knows nothing of reinforcement learning.

`Sandbox(limits).run(program, stdin)` is all there is; `docs/sandbox.md` says what it promises.
"""

from verl.utils.sandbox.sandbox import (
    Limits,
    RunResult,
    Sandbox,
    SandboxError,
    SandboxUnavailable,
    check_available,
)

__all__ = [
    "Limits",
    "RunResult",
    "Sandbox",
    "SandboxError",
    "SandboxUnavailable",
    "check_available",
]
