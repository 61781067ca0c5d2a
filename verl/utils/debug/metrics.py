"""Old import path of the comparison between rollout and training probabilities."""

from verl.trainer.ppo.metric_utils import calculate_debug_metrics

__all__ = ["calculate_debug_metrics"]
