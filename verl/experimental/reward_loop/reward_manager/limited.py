"""The manager `rate_limited`, made from the configuration, and the bucket it uses."""

from verl.workers.reward_manager import limited
from verl.workers.reward_manager.limited import AsyncTokenBucket
from verl.workers.reward_manager.loop_style import loop_style

__all__ = ["AsyncTokenBucket", "RateLimitedRewardManager"]

RateLimitedRewardManager = loop_style(limited.RateLimitedRewardManager)
