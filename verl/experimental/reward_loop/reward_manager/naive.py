"""The manager `naive`, made from the configuration."""

from verl.workers.reward_manager import naive
from verl.workers.reward_manager.loop_style import loop_style

__all__ = ["NaiveRewardManager"]

NaiveRewardManager = loop_style(naive.NaiveRewardManager)
