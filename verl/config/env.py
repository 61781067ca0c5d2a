"""Environments that rows of `env_agent` act in."""

from dataclasses import dataclass
from typing import Any

from verl.config.base import BaseConfig, option


@dataclass(kw_only=True)
class EnvConfig(BaseConfig):
    """The world of the agent loop `env_agent`, and the processes that worlds run in."""

    name: str | None = None
    """Environment of rows without an `env` of their own: `gymnasium:FrozenLake-v1`,
    `textarena:GuessTheNumber-v0`, `package.module.Class` or `path/to/file.py:Class`."""

    kwargs: dict[str, Any] = option(default_factory=dict)
    """Arguments of that environment."""

    python: str | None = None
    """Interpreter of an environment that needs packages of its own; null is this one."""

    num_workers: int = option(64, minimum=1)
    """Most environments at a time, each in a process; further trajectories wait."""

    timeout_seconds: float = option(60.0, above=0)
    """Longest call of an environment; then its process is killed and its trajectory dropped."""

    max_observation_length: int = option(8192, minimum=1)
    """Longest text of an observation, in characters; the middle of a longer one is cut out."""
