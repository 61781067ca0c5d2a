"""The manager `naive`, made from the configuration."""

from verl.workers.reward_manager import managers
from verl.workers.reward_manager.adapters import loop_style

__all__ = ["NaiveRewardManager"]

NaiveRewardManager = loop_style(managers.NaiveRewardManager)
