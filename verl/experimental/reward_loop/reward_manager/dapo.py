"""The manager `dapo`, made from the configuration."""

from verl.workers.reward_manager import managers
from verl.workers.reward_manager.adapters import loop_style

__all__ = ["DAPORewardManager"]

DAPORewardManager = loop_style(managers.DAPORewardManager)
