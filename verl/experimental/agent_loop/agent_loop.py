"""Older import path of `verl.agent_loop`."""

from verl.agent_loop import (
    AgentLoopBase,
    AgentLoopManager,
    AgentLoopMetrics,
    AgentLoopOutput,
    AsyncLLMServerManager,
    DictConfigWrap,
    register,
)
from verl.agent_loop.base import agent_loops as _agent_loop_registry
from verl.agent_loop.llm_server import AgentLoopWorker
from verl.agent_loop.manager import get_trajectory_info

AgentLoopWorkerBase = AgentLoopWorker

__all__ = [
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentLoopWorker",
    "AgentLoopWorkerBase",
    "AsyncLLMServerManager",
    "DictConfigWrap",
    "_agent_loop_registry",
    "get_trajectory_info",
    "register",
]
