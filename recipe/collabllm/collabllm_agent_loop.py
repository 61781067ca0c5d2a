"""The name that files of agent loops have for `verl.trainer.recipes.collabllm.agent_loop`."""

from verl.trainer.recipes.collabllm.agent_loop import CollabLLMAgentLoop

__all__ = ["CollabLLMAgentLoop"]
