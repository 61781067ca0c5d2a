"""The name that files of agent loops have for `verl.trainer.recipes.collabllm`."""

from verl.trainer.recipes.collabllm import CollabLLMAgentLoop

__all__ = ["CollabLLMAgentLoop"]
