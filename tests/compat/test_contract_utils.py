"""What code written for this interface relies on: rewards, files, profiling, tracking, chats."""

import asyncio
import logging
from hashlib import md5

import numpy as np
import pytest
import torch

from tests.registries import restored
from tests.tiny_tokenizer import tiny_tokenizer
from verl.experimental.reward_loop.reward_manager import (
    NaiveRewardManager,
    RateLimitedRewardManager,
)
from verl.experimental.reward_loop.reward_manager.limited import AsyncTokenBucket
from verl.interactions.base import BaseInteraction
from verl.interactions.gsm8k_interaction import Gsm8kInteraction
from verl.interactions.utils.interaction_registry import (
    get_interaction_class,
    initialize_interactions_from_config,
)
from verl.protocol import DataProto
from verl.utils import fs
from verl.utils.profiler import DistProfiler, ProfilerConfig, profile
from verl.utils.profiler.config import NsightToolConfig
from verl.utils.reward_score import default_compute_score, gsm8k
from verl.utils.reward_score.sandbox_fusion import utils as sandbox
from verl.utils.tracking import _MlflowLoggingAdapter
from verl.workers.reward_manager.registry import (
    REWARD_MANAGER_REGISTRY,
    get_reward_manager_cls,
    register,
)


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        (r"\frac{\sqrt{505}}{7}", r"\frac{\sqrt{505}}{7}"),
        ("x^2 + y^2 + 4x - 6y + 13", "(x+2)^2 + (y-3)^2"),
        (
            "\\begin{bmatrix}\n1 & 2 \\\\\n3 & 4\n\\end{bmatrix}",
            "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
        ),
        (
            "So the answer is $\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}$.",
            "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}",
        ),
    ],
)
def test_a_response_that_is_an_expression_is_the_answer(response, truth):
    found = default_compute_score("numina_aops_forum", response, truth)
    assert (found["score"] if isinstance(found, dict) else found) == 1.0


def test_the_sandbox_is_asked_once_per_case_through_its_name(monkeypatch):
    calls = []

    def fake(**keywords):
        calls.append(keywords)
        return None, "text"

    monkeypatch.setattr(sandbox, "call_sandbox_api", fake)
    verdicts, records = sandbox.check_correctness(
        "not an address", {"inputs": ["1", "2"], "outputs": ["1", "2"]}, "print(input())"
    )
    assert [call["stdin"] for call in calls] == ["1", "2"]
    names = "sandbox_fusion_url code stdin compile_timeout run_timeout memory_limit_mb language"
    assert set(calls[0]) == set(names.split())
    assert verdicts == [-1, -1]
    assert [record["case_index"] for record in records] == [0, 1]
    assert {record["status"] for record in records} == {"api_error"}
    assert {record["api_request_error"] for record in records} == {"text"}


def test_the_registry_of_reward_managers_is_a_dict():
    with restored(REWARD_MANAGER_REGISTRY):
        REWARD_MANAGER_REGISTRY.clear()
        REWARD_MANAGER_REGISTRY.update({"a": "plain text"})
        assert "a" in REWARD_MANAGER_REGISTRY
        assert get_reward_manager_cls("a") == "plain text"
        first, second = type("First", (), {}), type("Second", (), {})
        register("mine")(first)
        with pytest.raises(ValueError, match="mine"):
            register("mine")(second)
        assert get_reward_manager_cls("mine") is first
        with pytest.raises(ValueError, match="Unknown reward manager: nope"):
            get_reward_manager_cls("nope")


def scores(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": 1.0, "correct": True}


async def awaited(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return 1.0


def one_response():
    arrays = {
        "data_source": np.array(["x"], dtype=object),
        "reward_model": np.array([{"ground_truth": "1"}], dtype=object),
        "extra_info": np.array([{}], dtype=object),
    }
    tensors = {
        "responses": torch.tensor([[5, 6]]),
        "attention_mask": torch.ones(1, 4, dtype=torch.long),
        "prompts": torch.tensor([[3, 4]]),
    }
    return DataProto.from_dict(tensors, non_tensors=arrays)


@pytest.mark.parametrize("manager", [NaiveRewardManager, RateLimitedRewardManager])
def test_a_manager_without_configuration_reports_every_key(manager):
    made = manager(
        config=None,
        tokenizer=tiny_tokenizer(),
        compute_score=scores,
        num_examine=0,
        reward_fn_key="data_source",
    )
    result = asyncio.run(made.run_single(one_response()))
    assert result["reward_score"] == 1.0
    assert result["reward_extra_info"]["score"] == 1.0
    assert result["reward_extra_info"]["correct"] is True
    assert made.is_async_reward_score is False
    assert manager(tokenizer=tiny_tokenizer(), compute_score=awaited).is_async_reward_score


def test_a_token_bucket_knows_when_it_was_counted():
    bucket = AsyncTokenBucket(rate_limit=10.0)
    assert bucket.last_update is None
    asyncio.run(bucket.acquire())
    assert bucket.last_update is not None


def test_files_have_their_older_names(tmp_path):
    assert fs.md5_encode("a") == md5(b"a").hexdigest()
    assert (
        fs.get_local_temp_path("hdfs://a/b/c.txt", "C")
        == f"C/{fs.md5_encode('hdfs://a/b/c.txt')}/c.txt"
    )
    assert fs.exists(str(tmp_path))
    fs.makedirs(str(tmp_path / "x" / "y"))
    assert (tmp_path / "x" / "y").is_dir()


def test_a_remote_file_is_fetched_through_the_names_of_the_module(tmp_path, monkeypatch):
    fetched = []

    def fake(src, dst, **kwargs):
        fetched.append(src)
        with open(dst, "w") as file:
            file.write("contents")

    monkeypatch.setattr(fs, "copy", fake)
    source, cache = "hdfs://a/b/file.txt", str(tmp_path)
    local = fs.copy_to_local(source, cache_dir=cache)
    assert local == f"{cache}/{fs.md5_encode(source)}/file.txt"
    assert fs.copy_to_local(source, cache_dir=cache) == local
    assert len(fetched) == 1
    fs.copy_to_local(source, cache_dir=cache, always_recopy=True)
    assert len(fetched) == 2
    monkeypatch.setattr(fs, "is_non_local", lambda path: False)
    assert fs.copy_to_local(source, cache_dir=cache) == source


def test_the_cache_of_an_earlier_version_is_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(fs, "copy", lambda *paths: pytest.fail("it is there"))
    folder = tmp_path / fs.md5_encode("hdfs://a/old.txt")
    folder.mkdir(mode=0o700)
    (folder / "old.txt").write_text("old")
    assert fs.copy_to_local("hdfs://a/old.txt", cache_dir=str(tmp_path)) == str(folder / "old.txt")


def test_copies_and_folders_are_compared_without_an_error(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "a").write_text("1")
    assert fs.verify_copy(str(one), str(other)) is True
    record = fs._record_directory_structure(str(one))
    assert fs._check_directory_structure(str(one), record) is True
    (one / "b").mkdir()
    assert fs._check_directory_structure(str(one), record) is False
    assert fs.verify_copy(str(tmp_path / "nowhere"), str(other)) is False


def test_a_profiler_of_nsight_is_made_without_a_gpu(monkeypatch, tmp_path):
    config = ProfilerConfig(tool="nsys", enable=True, all_ranks=True, save_path=str(tmp_path))
    profiler = DistProfiler(0, config, tool_config=NsightToolConfig(discrete=False))
    assert profiler.check_this_rank()
    assert not profiler.check_this_step()
    calls = []
    monkeypatch.setattr(profile, "is_cuda_available", True)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    profiler.start()
    assert profiler.check_this_step()
    profiler.stop()
    assert not profiler.check_this_step()
    assert calls == ["start", "stop"]


def test_a_renamed_metric_is_warned_about_once(caplog):
    adapter = _MlflowLoggingAdapter()
    assert isinstance(adapter.logger, logging.Logger)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert adapter.clean({"invalid@key!": 1.0, "a//b": 2.0, "fine": 3.0}) == {
                "invalid_at_key_": 1.0,
                "a/b": 2.0,
                "fine": 3.0,
            }
    assert len(caplog.records) == 2
    assert "invalid@key!" in caplog.text
    assert "invalid_at_key_" in caplog.text


def test_an_interaction_is_usable_itself():
    interaction = BaseInteraction({"name": "mine"})
    assert (interaction.config, interaction.name) == ({"name": "mine"}, "mine")
    assert BaseInteraction({}).name == "interaction_agent"

    async def talk():
        instance = await interaction.start_interaction()
        assert len(instance) == 36
        is_over, text, score, extra = await interaction.generate_response(instance, [])
        assert (type(is_over), type(text), type(score), type(extra)) == (bool, str, float, dict)
        assert isinstance(await interaction.calculate_score(instance), float)
        await interaction.finalize_interaction(instance)

    asyncio.run(talk())


def test_the_interaction_of_gsm8k_scores_the_last_words_of_the_assistant(monkeypatch):
    interaction = Gsm8kInteraction({})

    async def talk():
        instance = await interaction.start_interaction(ground_truth="4")
        assert interaction._instance_dict[instance] == {
            "response": "",
            "ground_truth": "4",
            "reward": 0.0,
        }
        right = [{"role": "assistant", "content": "#### 4"}, {"role": "user", "content": "?"}]
        assert await interaction.generate_response(instance, right) == (
            True,
            "Your response is correct!",
            1.0,
            {},
        )
        wrong = [{"role": "assistant", "content": "#### 5"}]
        again = "Your response is incorrect! You need to reflect on your answer and try again."
        assert await interaction.generate_response(instance, wrong) == (False, again, 0.0, {})
        monkeypatch.setattr(gsm8k, "compute_score", lambda *args, **kwargs: 0.5)
        assert await interaction.calculate_score(instance, more=1) == 0.5
        await interaction.finalize_interaction(instance, more=1)
        with pytest.raises(KeyError):
            await interaction.finalize_interaction("unknown")

    asyncio.run(talk())


def test_interactions_are_made_from_a_file(tmp_path):
    path = tmp_path / "interactions.yaml"
    base = "class_name: verl.interactions.base.BaseInteraction\n    config: {}\n"
    path.write_text(
        "interaction:\n"
        f"  - {base}"
        "  - class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction\n    config: {}\n"
        f"  - name: third\n    {base}"
    )
    made = initialize_interactions_from_config(str(path))
    assert {name: one.name for name, one in made.items()} == {
        "base": "base",
        "gsm8k": "gsm8k",
        "third": "third",
    }
    path.write_text(f"interaction:\n  - {base}  - {base}")
    with pytest.raises(ValueError, match="Duplicate interaction name 'base' found"):
        initialize_interactions_from_config(str(path))
    path.write_text("interaction: []\n")
    assert initialize_interactions_from_config(str(path)) == {}
    assert get_interaction_class("verl.interactions.base.BaseInteraction") is BaseInteraction
    with pytest.raises(ModuleNotFoundError):
        get_interaction_class("no_such_package.mod.Class")
