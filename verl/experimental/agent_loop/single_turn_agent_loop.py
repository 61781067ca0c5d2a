"""Older import path of the single-turn agent loop."""

from verl.agent_loop.single_turn import SingleTurnAgentLoop

__all__ = ["SingleTurnAgentLoop"]
