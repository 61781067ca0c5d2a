import asyncio
import inspect
import logging

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.tiny_tokenizer import tiny_tokenizer
from verl.protocol import DataProto
from verl.trainer.ppo.reward import (
    RewardError,
    compute_reward,
    compute_reward_async,
    get_custom_reward_fn,
    load_reward_manager,
    takes_whole_batch,
)
from verl.workers.reward_manager import AbstractRewardManager, register

FUNCTIONS = """
from verl import DataProto

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return float(solution_str == ground_truth) + bonus

async def compute_later(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return 2 * bonus

def score_batch(data: DataProto):
    return data.batch["responses"].float().sum(-1)

def score_tokens(batch):
    return data_rewards(batch)

def data_rewards(batch):
    return batch.batch["responses"].float()

not_a_function = 3
"""


@register("recording_for_tests")
class RecordingManager(AbstractRewardManager):
    """Gives every response what `compute_score` says about it, on its first token."""

    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source", **kw):
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.options = kw

    def __call__(self, data, return_dict=False):
        rewards = torch.zeros(data.batch["responses"].shape)
        for row, source in enumerate(data.non_tensor_batch["data_source"]):
            rewards[row, 0] = self.compute_score(
                data_source=source, solution_str="4", ground_truth="4", extra_info={}
            )
        if not return_dict:
            return rewards
        return {"reward_tensor": rewards, "reward_extra_info": {"acc": [1.0] * len(data)}}


def batch() -> DataProto:
    return DataProto.from_dict(
        tensors={
            "responses": torch.tensor([[1, 2], [3, 0]]),
            "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        },
        non_tensors={"data_source": np.array(["math", "code"], dtype=object)},
    )


def config(path=None, name="compute_score", manager="recording_for_tests", **more):
    return OmegaConf.create(
        {
            "custom_reward_function": {"path": path and str(path), "name": name, **more},
            "reward_manager": {
                "source": "register",
                "name": manager,
                "module": {"path": None, "name": "custom_reward_manager"},
            },
            "reward_model": {
                "reward_kwargs": {},
                "sandbox_fusion": {"url": None, "max_concurrent": 4, "memory_limit_mb": 64},
            },
            "data": {"reward_fn_key": "data_source"},
        }
    )


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(FUNCTIONS)
    return path


# ---- loading a function --------------------------------------------------------------------------


def test_without_a_path_there_is_no_custom_function():
    assert get_custom_reward_fn(config()) is None


def test_a_function_is_loaded_by_path_and_name(file):
    function = get_custom_reward_fn(config(file))
    assert function(data_source="m", solution_str="4", ground_truth="4") == 1.0


def test_fixed_arguments_reach_every_call_and_win(file):
    function = get_custom_reward_fn(config(file, reward_kwargs={"bonus": 0.5}))
    assert function("m", "5", "4", bonus=9.0) == 0.5
    assert list(inspect.signature(function).parameters)[:2] == ["data_source", "solution_str"]


def test_an_async_function_stays_async(file):
    function = get_custom_reward_fn(config(file, "compute_later", reward_kwargs={"bonus": 1.5}))
    assert inspect.iscoroutinefunction(function)
    assert asyncio.run(function("m", "5", "4")) == 3.0


def test_a_missing_file_or_function_is_named_with_the_key_to_change(file, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"custom_reward_function: .*nowhere\.py"):
        get_custom_reward_fn(config(tmp_path / "nowhere.py"))
    with pytest.raises(
        AttributeError, match=r"custom_reward_function: .*Did you mean 'compute_score'"
    ):
        get_custom_reward_fn(config(file, "compute_scores"))
    with pytest.raises(ValueError, match=r"\(not_a_function\) in .* is int, not a function"):
        get_custom_reward_fn(config(file, "not_a_function"))


def test_a_file_that_fails_to_load_shows_why(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("1 / 0\n")
    with pytest.raises(RuntimeError, match=r"custom_reward_function: .*ZeroDivisionError"):
        get_custom_reward_fn(config(path))


def test_the_typed_configuration_is_understood_too(file):
    from verl.config.reward import CustomRewardFunctionConfig

    class Run:
        custom_reward_function = CustomRewardFunctionConfig(
            path=str(file), reward_kwargs={"bonus": 2.0}
        )

    assert get_custom_reward_fn(Run())("m", "5", "4") == 2.0


# ---- per sample or whole batch -------------------------------------------------------------------


def per_sample(data_source, solution_str, ground_truth, extra_info=None): ...
def per_sample_without_source(solution_str, **kwargs): ...
def per_sample_keywords(**kwargs): ...
def lists(data_sources, solution_strs, ground_truths, extra_infos): ...
def lists_with_defaults(solution_strs, ground_truths=None): ...
def annotated(tokenizer, batch: DataProto): ...
def annotated_by_name(batch: "verl.DataProto"): ...  # noqa: F821
def one_argument(data, scale=1.0): ...
def served(reward_router_address, **kwargs): ...


@pytest.mark.parametrize(
    ("function", "is_whole_batch"),
    [
        (per_sample, False),
        (per_sample_without_source, False),
        (per_sample_keywords, False),
        (lists, False),
        (lists_with_defaults, False),
        (annotated, True),
        (annotated_by_name, True),
        (one_argument, True),
        (served, False),
    ],
)
def test_the_signature_decides_how_a_function_is_called(function, is_whole_batch):
    assert takes_whole_batch(function)[0] is is_whole_batch


def test_an_argument_that_the_configuration_gives_is_not_the_batch(file):
    file.write_text("def ask(url, **kwargs):\n    return float(len(url))\n")
    run = config(file, "ask", manager="naive", reward_kwargs={"url": "http"})
    manager = load_reward_manager(run, tiny_tokenizer(), num_examine=0)
    assert manager(batch()).sum(1).tolist() == [4.0, 4.0]
    assert takes_whole_batch(one_argument, given=["data"])[0] is False


def test_a_whole_batch_function_scores_by_itself_and_the_log_says_so(file, caplog):
    with caplog.at_level(logging.INFO, logger="verl"):
        reward_fn = load_reward_manager(config(file, "score_batch"), None, num_examine=0)
    assert "score_batch is called once with the whole batch: its parameter 'data' is" in caplog.text
    rewards, extras = compute_reward(batch(), reward_fn)
    assert rewards.tolist() == [[0.0, 3.0], [3.0, 0.0]]  # on the last token of each response
    assert extras == {}
    per_token = load_reward_manager(config(file, "score_tokens"), None, num_examine=0)
    assert compute_reward(batch(), per_token)[0].tolist() == [[1.0, 2.0], [3.0, 0.0]]
    assert torch.equal(per_token(batch()), batch().batch["responses"].float())


def test_a_whole_batch_function_with_the_wrong_shape_is_refused(file):
    file.write_text(FUNCTIONS + "\ndef wrong(data):\n    return [1.0]\n")
    reward_fn = load_reward_manager(config(file, "wrong"), None, num_examine=0)
    with pytest.raises(RewardError, match=r"wrong returned list; it must return a tensor of shape"):
        compute_reward(batch(), reward_fn)


def test_an_async_whole_batch_function_is_refused(file):
    file.write_text(FUNCTIONS + "\nasync def later(data):\n    return None\n")
    with pytest.raises(ValueError, match="only per-sample functions may be async"):
        load_reward_manager(config(file, "later"), None, num_examine=0)


# ---- managers ------------------------------------------------------------------------------------


def test_a_per_sample_function_goes_to_the_named_manager(file, caplog):
    with caplog.at_level(logging.INFO, logger="verl"):
        manager = load_reward_manager(config(file), "tokenizer", num_examine=1, max_resp_len=9)
    assert "compute_score is called once per response" in caplog.text
    assert isinstance(manager, RecordingManager)
    assert (manager.tokenizer, manager.num_examine) == ("tokenizer", 1)
    assert manager.options == {"max_resp_len": 9}
    rewards, extras = compute_reward(batch(), manager)
    assert rewards.tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert extras == {"acc": [1.0, 1.0]}


def test_an_unknown_manager_lists_the_known_ones(file):
    with pytest.raises(
        ValueError, match=r"Unknown reward manager: recording\. .*recording_for_tests"
    ):
        load_reward_manager(config(file, manager="recording"), None, num_examine=0)


def test_a_manager_class_can_come_from_a_file(file, tmp_path):
    (tmp_path / "manager.py").write_text(
        "class Mine:\n    def __init__(self, **options):\n        self.options = options\n"
    )
    run = config(file, manager="Mine")
    run.reward_manager.source = "importlib"
    with pytest.raises(ValueError, match=r"reward_manager.module.path must name the file.* Mine"):
        load_reward_manager(run, None, num_examine=0)
    run.reward_manager.module.path = str(tmp_path / "manager.py")
    run.reward_manager.module.name = "manager_module_for_tests"
    assert load_reward_manager(run, "t", num_examine=2).options["num_examine"] == 2


LOOP_MANAGER = """
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

class Mine(RewardManagerBase):
    prepared = []

    def __init__(self, config, tokenizer, compute_score):
        super().__init__(config, tokenizer)
        self.compute_score = compute_score

    @classmethod
    def init_class(cls, config, tokenizer):
        cls.prepared.append(tokenizer)

    async def run_single(self, data):
        score = self.compute_score(data_source="m", solution_str="4", ground_truth="4")
        return {"reward_score": score, "reward_extra_info": {"acc": True}}

class Plain(RewardManagerBase):
    async def run_single(self, data):
        return {"reward_score": 0.5}
"""


def loop_run(file, tmp_path, name):
    (tmp_path / "loop_manager.py").write_text(LOOP_MANAGER)
    run = config(file)
    run.reward_model.reward_loop_source = "importlib"
    run.reward_model.reward_loop_module_path = str(tmp_path / "loop_manager.py")
    run.reward_model.reward_loop_class_name = name
    return run


def test_a_class_of_the_reward_loop_can_come_from_a_file(file, tmp_path):
    run = loop_run(file, tmp_path, "Mine")
    manager = load_reward_manager(run, "tokenizer", num_examine=0, timeout_seconds=9.0)
    load_reward_manager(run, "tokenizer", num_examine=1)
    assert type(manager).prepared == ["tokenizer"], "once per class"
    assert manager.timeout_seconds == 9.0
    rewards, extras = compute_reward(batch(), manager)
    assert rewards.tolist() == [[0.0, 1.0], [1.0, 0.0]]
    assert extras == {"acc": [True, True]}


def test_a_class_takes_only_the_arguments_it_names(file, tmp_path):
    manager = load_reward_manager(loop_run(file, tmp_path, "Plain"), None, num_examine=0)
    assert compute_reward(batch(), manager)[0].sum(1).tolist() == [0.5, 0.5]


def test_a_class_of_the_reward_loop_needs_a_file_and_a_name(file, tmp_path):
    run = loop_run(file, tmp_path, None)
    with pytest.raises(ValueError, match=r"reward_loop_class_name \(None\) must name the class"):
        load_reward_manager(run, None, num_examine=0)


def test_a_function_and_a_manager_of_different_forms_are_refused_with_the_way_out(file):
    with pytest.raises(ValueError, match=r"compute_score takes .*: set reward_manager.name=naive"):
        load_reward_manager(config(file, manager="batch"), None, num_examine=0)
    file.write_text("def f(data_sources, solution_strs, ground_truths, extra_infos):\n    ...\n")
    with pytest.raises(ValueError, match=r"f takes lists .*; set reward_manager.name=batch"):
        load_reward_manager(config(file, "f", manager="naive"), None, num_examine=0)
    load_reward_manager(config(file, "f", manager="batch"), None, num_examine=0)


def test_limits_of_the_configuration_reach_the_manager_and_its_own_options_win(file):
    run = config(file, manager="rate_limited")
    run.reward_model.max_concurrent = 5
    assert load_reward_manager(run, None, num_examine=0).max_concurrent == 5
    assert load_reward_manager(run, None, num_examine=0, max_concurrent=7).max_concurrent == 7


def test_a_served_reward_model_is_passed_to_the_function_of_any_manager(file):
    file.write_text(
        "def ask(reward_router_address, **kw):\n    return len(reward_router_address)\n"
    )
    manager = load_reward_manager(
        config(file, "ask", manager="naive"),
        tiny_tokenizer(),
        num_examine=0,
        reward_router_address="here:1",
    )
    assert manager(batch()).sum(1).tolist() == [6.0, 6.0]


def test_options_that_a_built_in_manager_does_not_read_are_named(file, caplog):
    load_reward_manager(config(file, manager="naive"), None, num_examine=0, max_resp_len=4)
    assert "['max_resp_len']: NaiveRewardManager does not read them" in caplog.text
    caplog.clear()
    load_reward_manager(config(file, manager="dapo"), None, num_examine=0, max_resp_len=4)
    assert not caplog.text


def test_a_whole_batch_function_that_hangs_stops_the_step_at_its_deadline(file, caplog):
    file.write_text("import time\ndef hang(data):\n    time.sleep(20)\n")
    reward_fn = load_reward_manager(
        config(file, "hang"), None, num_examine=0, timeout_seconds=0.2, max_resp_len=4
    )
    assert "['max_resp_len']: no manager is there" in caplog.text
    with pytest.raises(RewardError, match=r"hang took longer than 0\.2 s"):
        compute_reward(batch(), reward_fn)


# ---- computing -----------------------------------------------------------------------------------


def test_an_error_in_the_reward_stops_the_step_and_is_the_cause():
    num_calls = []

    def broken(data, return_dict=False):
        num_calls.append(1)
        raise KeyError("no such answer")

    with pytest.raises(RewardError, match=r"broken failed on a batch of 2 responses") as raised:
        compute_reward(batch(), broken)
    assert isinstance(raised.value.__cause__, KeyError)
    assert "from ['code', 'math']: KeyError" in str(raised.value)
    assert len(num_calls) == 1


def test_a_manager_that_knows_no_return_dict_is_called_without_it():
    def plain(data):
        return torch.ones(2, 2)

    assert compute_reward(batch(), plain)[0].tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.ones(1, 2), r"returned \(1, 2\); rewards are a tensor of shape \(2, 2\)"),
        (torch.ones(2), r"returned \(2,\); rewards are"),
        ([1.0, 1.0], "returned list; rewards are"),
        (torch.tensor([[1.0, float("nan")], [0, 0]]), r"not finite for responses \[0\]"),
        (torch.tensor([[1.0, 0], [0, float("inf")]]), r"not finite for responses \[1\]"),
        (
            {"reward_tensor": torch.ones(2, 2), "reward_extra_info": {"acc": [1.0]}},
            "reported 1 values of 'acc' for 2 responses",
        ),
    ],
)
def test_an_answer_of_the_wrong_form_stops_before_it_is_trained_on(result, message):
    with pytest.raises(RewardError, match=message):
        compute_reward(batch(), lambda data, return_dict=False: result)


def test_background_scoring_without_ray_is_the_same_call(file):
    rewards, extras = compute_reward_async(batch(), config(file), tokenizer="tokenizer")
    assert rewards.tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert extras == {"acc": [1.0, 1.0]}
    with pytest.raises(ValueError, match="needs reward_fn, or config and tokenizer"):
        compute_reward_async(batch())


@pytest.mark.ray
@pytest.mark.slow
def test_background_scoring_runs_in_a_ray_task(file, ray_cluster):
    import ray

    reference = compute_reward_async.remote(batch(), config(file, "score_batch"), "tokenizer")
    rewards, extras = ray.get(reference, timeout=60)
    assert rewards.tolist() == [[0.0, 3.0], [3.0, 0.0]]
    assert extras == {}
