"""What the sandbox is told to do, as JSON between `Sandbox` and the supervisor it starts.

The modules of this folder are loaded for every run, so they use what the standard library loads
quickly: no dataclasses, no pathlib.
"""

import json
from types import SimpleNamespace

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

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> "Spec":
        return cls(**json.loads(text))
