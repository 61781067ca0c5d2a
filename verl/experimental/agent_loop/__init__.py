"""Older import path of `verl.agent_loop`."""

from verl.agent_loop import (
    AgentLoopBase,
    AgentLoopManager,
    AgentLoopMetrics,
    AgentLoopOutput,
    AsyncLLMServerManager,
    register,
)

__all__ = [
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AsyncLLMServerManager",
    "register",
]
