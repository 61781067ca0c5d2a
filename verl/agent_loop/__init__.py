"""From prompts to trajectories: agent loops, and the manager that runs them over the engines."""

from verl.agent_loop.base import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    DictConfigWrap,
    LoopResult,
    agent_loops,
    register,
)
from verl.agent_loop.manager import AgentLoopManager
from verl.agent_loop.server_manager import AsyncLLMServerManager

__all__ = [
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AsyncLLMServerManager",
    "DictConfigWrap",
    "LoopResult",
    "agent_loops",
    "register",
]
