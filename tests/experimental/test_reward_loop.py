"""Scoring from a configuration alone, as programs of one's own call it."""

import asyncio

import pytest

from tests.tiny_tokenizer import save_tiny_model
from tests.workers.reward_manager.batches import batch
from verl.config.model import HFModelConfig
from verl.config.ppo import ActorRolloutRefConfig, PPOConfig
from verl.config.reward import CustomRewardFunctionConfig, RewardManagerConfig
from verl.experimental.reward_loop import RewardLoopManager, RewardLoopWorker

FUNCTION = """
def compute_score(solution_str, ground_truth, **kwargs):
    score = float(solution_str == ground_truth)
    return {"score": score, "length": len(solution_str), **kwargs["extra_info"]}

def ask(reward_router_address, **kwargs):
    return {"score": 1.0, "where": reward_router_address}

def lists(solution_strs, **kwargs):
    return [1.0] * len(solution_strs)
"""


@pytest.fixture
def config(tmp_path):
    save_tiny_model(tmp_path / "model")
    (tmp_path / "reward.py").write_text(FUNCTION)

    def make(name="compute_score", manager="naive"):
        model = HFModelConfig(path=str(tmp_path / "model"))
        path = str(tmp_path / "reward.py")
        made = PPOConfig(
            actor_rollout_ref=ActorRolloutRefConfig(model=model),
            custom_reward_function=CustomRewardFunctionConfig(path=path, name=name),
            reward_manager=RewardManagerConfig(name=manager),
        )
        object.__setattr__(made.reward_model.model, "path", str(tmp_path / "model"))
        return made

    return make


def test_a_manager_scores_a_batch(config):
    found = RewardLoopManager(config()).compute_rm_score(batch("7", "78"))
    assert found.batch["rm_scores"].tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert found.meta_info["reward_extra_keys"][:2] == ["length", "index"]
    assert found.non_tensor_batch["length"].tolist() == [1, 3]


def test_a_worker_scores_responses_one_by_one(config):
    worker = RewardLoopWorker(config())
    results = asyncio.run(worker.compute_score_batch(batch("7", "8")))
    assert [result["reward_score"] for result in results] == [1.0, 0.0]
    assert asyncio.run(worker.compute_score(batch("7")))["reward_extra_info"]["length"] == 1


def test_a_worker_tells_the_function_where_the_reward_model_is(config):
    worker = RewardLoopWorker(config("ask"), reward_router_address="127.0.0.1:9")
    result = asyncio.run(worker.compute_score(batch("7")))
    assert result["reward_extra_info"] == {"where": "127.0.0.1:9"}


def test_a_manager_of_whole_batches_cannot_score_one_by_one(config):
    worker = RewardLoopWorker(config("lists", "batch"))
    with pytest.raises(ValueError, match="scores whole batches"):
        asyncio.run(worker.compute_score(batch("7")))
