"""Worlds that a model acts in: the protocol, adapters for packages, and the pool that runs them.

Importing this needs the standard library only, for interpreters that have nothing else of ours.
"""

from verl.environments.base import (
    Action,
    Environment,
    InvalidAction,
    Observation,
    ToolCall,
    environments,
    register_environment,
)

__all__ = [
    "Action",
    "Environment",
    "InvalidAction",
    "Observation",
    "ToolCall",
    "environments",
    "register_environment",
]
