"""`ModelRewardManager`: the reward model's score is the reward, in training and validation."""

from typing import Any

from torch import Tensor

from verl.protocol import DataProto
from verl.workers.reward_manager.abstract import AbstractRewardManager, precomputed_rewards


class ModelRewardManager(AbstractRewardManager):
    """Takes `rm_scores`, which the reward model's worker has put into the batch; asks nobody.

    `naive` does the same in training; in validation it grades rows that have an answer by rule.
    """

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        result = precomputed_rewards(data)
        if result is None:
            raise ValueError(
                "the batch has no rm_scores; reward_manager.name=model takes the score of a reward "
                "model: set reward_model.enable=True and reward_model.model.path"
            )
        return result if return_dict else result["reward_tensor"]
