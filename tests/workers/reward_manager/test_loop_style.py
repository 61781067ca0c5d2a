"""Managers that are made from the configuration and asked for one response at a time."""

import asyncio

import pytest
import torch
from omegaconf import OmegaConf

from tests.tiny_tokenizer import tiny_tokenizer
from tests.workers.reward_manager.batches import batch
from verl.experimental.reward_loop.reward_manager import (
    DAPORewardManager,
    NaiveRewardManager,
    RemoteRewardManager,
    RewardManagerBase,
    get_reward_manager_cls,
    register,
)
from verl.experimental.reward_loop.reward_manager.limited import RateLimitedRewardManager
from verl.workers.reward_manager.adapters import grades_of
from verl.workers.reward_manager.grader import (
    Abstain,
    InfraError,
    Score,
    as_result,
    from_result,
)
from verl.workers.reward_manager.managers import BatchRewardManager
from verl.workers.reward_manager.registry import REWARD_MANAGER_REGISTRY


def config(**reward_model):
    return OmegaConf.create({"reward_model": reward_model})


def single(manager, text="7"):
    return asyncio.run(manager.run_single(batch(text)))


@register("length_for_tests")
class LengthManager(RewardManagerBase):
    """Scores by length, in the way of a user's class."""

    async def run_single(self, data):
        item = data[0]
        num_tokens = int(item.batch["attention_mask"][1:].sum())
        score = await self.loop.run_in_executor(None, lambda: float(num_tokens))
        return {
            "reward_score": score,
            "reward_extra_info": {"source": item.non_tensor_batch["data_source"]},
        }


def test_a_users_class_scores_batches_too():
    manager = LengthManager(config(), tiny_tokenizer())
    result = manager(batch("7", "789"), return_dict=True)
    assert result["reward_tensor"].tolist() == [[1.0, 0, 0, 0], [0, 0, 3.0, 0]]
    assert result["reward_extra_info"] == {"source": ["sums", "sums"]}


def test_there_is_one_registry_and_a_class_is_given_in_the_style_of_the_caller():
    assert get_reward_manager_cls("length_for_tests") is LengthManager
    assert REWARD_MANAGER_REGISTRY["length_for_tests"] is LengthManager
    assert get_reward_manager_cls("naive") is NaiveRewardManager
    assert get_reward_manager_cls("batch") is BatchRewardManager
    assert get_reward_manager_cls("prime")(config(), tiny_tokenizer()).max_concurrent >= 1


@pytest.mark.parametrize("cls", [NaiveRewardManager, RemoteRewardManager, RateLimitedRewardManager])
def test_built_in_managers_are_made_from_the_configuration(cls):
    manager = cls(config(num_workers=1), tiny_tokenizer(), lambda solution_str, **kw: 0.5)
    assert single(manager) == {"reward_score": 0.5, "reward_extra_info": {"score": 0.5, "acc": 0.5}}
    assert [grade.value for grade in grades_of(batch("5", "6"), manager)] == [0.5, 0.5]


class OwnCall(BatchRewardManager):
    def __call__(self, data, return_dict=False):
        rewards = torch.zeros(data.batch["responses"].shape)
        rewards[:, 0] = 0.25
        return rewards


class OwnRunSingle(NaiveRewardManager):
    async def run_single(self, data):
        score = self.compute_score(solution_str="") / 4
        return {"reward_score": score, "reward_extra_info": {}}


def test_a_method_that_a_subclass_of_a_built_in_manager_overrides_is_the_one_that_is_called():
    made = (
        OwnCall(tiny_tokenizer(), 0, lambda **kw: [1.0, 1.0]),
        OwnRunSingle(config(), tiny_tokenizer(), lambda **kw: 1.0),
    )
    for manager in made:
        assert [grade.value for grade in grades_of(batch("5", "6"), manager)] == [0.25, 0.25]


def test_a_function_for_batches_may_run_an_event_loop_of_its_own():
    def function(data):
        rewards = torch.zeros(data.batch["responses"].shape)
        rewards[:, 0] = asyncio.run(asyncio.sleep(0, 0.5))
        return rewards

    assert [grade.value for grade in grades_of(batch("5", "6"), function)] == [0.5, 0.5]


def test_options_come_from_the_sections_that_are_there():
    buffer = {"enable": True, "len": 2, "penalty_factor": 1.0, "log": True}
    kwargs = {"max_resp_len": 2, "overlong_buffer_cfg": buffer}
    made = DAPORewardManager(config(reward_kwargs=kwargs), tiny_tokenizer(), lambda **kw: 1.0)
    assert single(made)["reward_extra_info"]["overlong_reward"] == -0.5
    named = OmegaConf.create({"reward_model": {}, "data": {"reward_fn_key": "kind"}})
    asked = NaiveRewardManager(named, tiny_tokenizer(), lambda data_source, **kw: len(data_source))
    assert asyncio.run(asked.run_single(batch("7", kind=["four"])))["reward_score"] == 4.0
    limited = RateLimitedRewardManager(config(max_concurrent=3, timeout=0.1), tiny_tokenizer())
    assert (limited.max_concurrent, limited.timeout_seconds) == (3, 0.1)


def test_a_served_reward_model_is_passed_to_the_function():
    def function(reward_router_address, reward_model_tokenizer, **kwargs):
        return {"score": 1.0, "where": reward_router_address, "what": reward_model_tokenizer}

    manager = NaiveRewardManager(config(), tiny_tokenizer(), function, "127.0.0.1:80", "tokenizer")
    extras = single(manager)["reward_extra_info"]
    assert extras == {"score": 1.0, "where": "127.0.0.1:80", "what": "tokenizer"}


def test_a_result_without_a_verdict_reads_0_and_is_marked():
    async def hangs(**kwargs):
        await asyncio.sleep(20)

    def raises(**kwargs):
        raise OSError("gone")

    late = single(RateLimitedRewardManager(config(timeout=0.1), tiny_tokenizer(), hangs))
    assert late["reward_score"] == 0.0
    assert late["reward_extra_info"] == {"score": 0.0, "timeout": True, "acc": 0.0}
    assert "took longer" in late["fault"]
    broken = single(RateLimitedRewardManager(config(), tiny_tokenizer(), raises))
    assert broken["reward_extra_info"]["error"] == broken["fault"]
    assert "OSError: gone" in broken["fault"]


@pytest.mark.parametrize(
    "grade",
    [
        Score(0.5, {"acc": True, "error": "a compiler's"}),
        Abstain("cannot tell"),
        InfraError("raised"),
        InfraError("late", is_timeout=True),
        InfraError("died", is_final=True),
    ],
)
def test_a_mark_outlives_a_subclass_that_changes_the_score(grade):
    assert from_result(as_result(grade)) == grade
    doubled = as_result(grade)
    doubled["reward_score"] *= 2
    expected = Score(1.0, grade.extras) if isinstance(grade, Score) else grade
    assert from_result(doubled) == expected


@pytest.mark.parametrize("result", [None, 1.0, {}, {"score": 1.0}])
def test_anything_but_the_mapping_is_a_fault(result):
    assert "it must return a mapping with reward_score" in from_result(result).reason


def test_a_class_without_run_single_cannot_be_made():
    class Nothing(RewardManagerBase):
        pass

    with pytest.raises(TypeError, match="run_single"):
        Nothing(config(), tiny_tokenizer())
