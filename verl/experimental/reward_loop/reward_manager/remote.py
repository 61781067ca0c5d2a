"""The manager `remote`, made from the configuration."""

from verl.workers.reward_manager import prime
from verl.workers.reward_manager.adapters import loop_style

__all__ = ["RemoteRewardManager"]

RemoteRewardManager = loop_style(prime.RemoteRewardManager)
