import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.workers.reward_manager import (
    REWARD_MANAGER_REGISTRY,
    AbstractRewardManager,
    get_reward_manager_cls,
    register,
)
from verl.workers.reward_manager.abstract import precomputed_rewards, scores_on_last_token


@register("constant_for_tests")
class ConstantManager(AbstractRewardManager):
    def __call__(self, data, return_dict=False):
        rewards = scores_on_last_token(torch.ones(len(data)), data)
        return {"reward_tensor": rewards, "reward_extra_info": {}} if return_dict else rewards


def batch(**more) -> DataProto:
    return DataProto.from_dict(
        tensors={
            "responses": torch.zeros(3, 2, dtype=torch.long),
            "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]]),
            **more,
        }
    )


def test_a_registered_manager_is_found_by_name_and_unchanged():
    assert get_reward_manager_cls("constant_for_tests") is ConstantManager
    assert REWARD_MANAGER_REGISTRY["constant_for_tests"] is ConstantManager
    assert register("constant_for_tests")(ConstantManager) is ConstantManager


def test_another_class_under_a_taken_name_is_refused():
    class Other(ConstantManager):
        pass

    with pytest.raises(ValueError, match="'constant_for_tests' is already registered"):
        register("constant_for_tests")(Other)


def test_an_unknown_name_lists_what_is_known():
    with pytest.raises(ValueError, match=r"Unknown reward manager: constant\..*constant_for_tests"):
        get_reward_manager_cls("constant")


def test_a_manager_keeps_what_it_is_made_with():
    manager = ConstantManager("tokenizer", 2, len, max_resp_len=5)
    assert manager.tokenizer == "tokenizer"
    assert manager.num_examine == 2
    assert manager.compute_score is len
    assert manager.reward_fn_key == "data_source"


def test_a_score_stands_on_the_last_token_and_an_empty_response_carries_none():
    rewards = scores_on_last_token(torch.tensor([1.0, 2.0, 3.0]), batch())
    assert rewards.tolist() == [[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]]


def test_scores_in_the_batch_are_taken_as_they_are():
    assert precomputed_rewards(batch()) is None
    scored = batch(rm_scores=torch.full((3, 2), 0.5))
    scored.meta_info["reward_extra_keys"] = ["acc"]
    scored.non_tensor_batch["acc"] = np.array([1, 0, 1], dtype=object)
    result = precomputed_rewards(scored)
    assert torch.equal(result["reward_tensor"], scored.batch["rm_scores"])
    assert result["reward_extra_info"] == {"acc": [1, 0, 1]}
