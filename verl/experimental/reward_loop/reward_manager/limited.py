"""The manager `rate_limited`, made from the configuration, and the bucket it uses."""

from verl.workers.reward_manager import managers
from verl.workers.reward_manager.adapters import loop_style
from verl.workers.reward_manager.managers import AsyncTokenBucket

__all__ = ["AsyncTokenBucket", "RateLimitedRewardManager"]

RateLimitedRewardManager = loop_style(managers.RateLimitedRewardManager)
