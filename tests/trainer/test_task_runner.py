"""What a run needs before it can be built is refused by name when it is not there."""

import asyncio
import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tests.config.composing import CONFIG_DIR
from tests.toy import REWARD, KeepsTrainer, toy_overrides, toy_run
from verl.agent_loop.base import DictConfigWrap
from verl.agent_loop.single_turn import SingleTurnAgentLoop
from verl.config.faults import ConfigError
from verl.trainer.main_ppo import create_rl_dataset, create_rl_sampler
from verl.trainer.ppo.reward import get_custom_reward_fn, load_reward_manager
from verl.trainer.task_runner import NoTokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.dataset.tables import DataError
from verl.utils.environment import BadData, EndsTheRun, Misuse, refusing
from verl.utils.reward_score import grading_fault
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.roles import ActorRolloutRefWorker, CriticWorker


def test_a_folder_without_a_tokenizer_is_named_with_its_keys(toy, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(NoTokenizer, match=r"empty.*actor_rollout_ref\.model\.path.*existing"):
        toy_run(toy, tmp_path, f"actor_rollout_ref.model.tokenizer_path={empty}")


def test_values_that_no_model_has_are_refused_before_a_rank_loads_one(toy, tmp_path):
    with pytest.raises(ConfigError, match=r"override_config\.zzz: LlamaConfig has no such value"):
        toy_run(toy, tmp_path, "actor_rollout_ref.model.override_config.zzz=1")


class AskedToStopEarly(KeepsTrainer):
    """As on Ray, where the driver asks while the trainer is built."""

    def build(self, config):
        self.request_stop()
        return super().build(config)


def test_a_stop_that_comes_while_the_trainer_is_built_is_not_forgotten(toy, tmp_path):
    metrics, trainer = toy_run(toy, tmp_path, "trainer.save_freq=1", runner_class=AskedToStopEarly)
    assert trainer.is_stop_requested
    assert metrics == [], "no step has begun"


@pytest.fixture(scope="module")
def composed(toy):
    """What Hydra gives a program of somebody's own: interpolations are not resolved."""
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        return compose("ppo_trainer", overrides=[f"++{one}" for one in toy_overrides(toy, toy)])


@pytest.fixture(scope="module")
def tokenizer(composed):
    return hf_tokenizer(composed.actor_rollout_ref.model.path)


def test_a_composed_configuration_makes_data_and_rewards(composed, tokenizer):
    dataset = create_rl_dataset(composed.data.train_files, composed.data, tokenizer, None)
    order = list(create_rl_sampler(composed.data, dataset))
    assert sorted(order) == list(range(24))
    assert set(collate_fn([dataset[row] for row in order[:3]])) >= {"raw_prompt", "data_source"}
    assert get_custom_reward_fn(composed)("sevens", "77", "7") == 0.25
    for name in ("naive", "prime", "dapo"):
        config = OmegaConf.merge(composed, {"reward_manager": {"name": name}})
        assert callable(load_reward_manager(config, tokenizer, num_examine=0))


def test_a_composed_configuration_makes_workers(composed):
    assert ActorRolloutRefWorker(composed.actor_rollout_ref, "actor").config.rollout.n == 4
    assert CriticWorker(composed.critic).config.ppo_mini_batch_size == 4


@pytest.mark.parametrize("name", ["dataset_config", "data_config"])
@pytest.mark.parametrize("wrap", [DictConfigWrap, lambda section: section])
def test_agent_loops_take_sections_wrapped_and_bare(name, wrap, composed, tokenizer):
    async def make():
        section = {name: wrap(composed.data)}
        return SingleTurnAgentLoop(
            wrap(composed), None, tokenizer, None, dataset_cls=RLHFDataset, **section
        )

    loop = asyncio.run(make())
    assert loop.data_config.max_prompt_length == 6
    assert loop.config.trainer.n_gpus_per_node == 1


GRADED = {"prompt": "1+1=", "data_source": "gsm8k", "reward_model": {"ground_truth": "2"}}
UNGRADABLE = {
    "an answer that is null": ({**GRADED, "reward_model": {"ground_truth": None}}, "no answer"),
    "no reward_model": ({"prompt": "1+1=", "data_source": "gsm8k"}, "no answer"),
    "a source that is null": ({**GRADED, "data_source": None}, "no data source"),
    "a source nobody grades": ({**GRADED, "data_source": "mine"}, "no built-in reward function"),
}


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("row", "reason"), UNGRADABLE.values(), ids=UNGRADABLE)
def test_rows_that_cannot_be_graded_are_named_and_left_out(
    row, reason, composed, tokenizer, tmp_path, caplog
):
    config = OmegaConf.merge(composed.data, {"cache_dir": str(tmp_path)})
    path = written(tmp_path / "rows.jsonl", [GRADED] * 3 + [row] + [GRADED] * 200)
    make = partial(create_rl_dataset, str(path), config, tokenizer, None)
    assert len(make()) == 204  # a reward function of one's own may grade all of them
    assert len(make(grading_fault=grading_fault)) == 203
    assert f"{path}:4: " in caplog.text
    assert reason in caplog.text


def test_a_run_stops_at_data_that_its_scorer_cannot_grade(toy, tmp_path):
    rows = written(tmp_path / "rows.jsonl", [UNGRADABLE["no reward_model"][0]] * 8)
    data = [f"data.train_files={rows}", f"data.val_files={rows}"]
    with pytest.raises(DataError, match="8 of 8 rows are bad"):
        toy_run(toy, tmp_path, *data, "custom_reward_function.path=null")
    toy_run(toy, tmp_path, *data, f"custom_reward_function.path={toy / 'parity.py'}")


def test_the_agent_loop_of_the_documentation_runs(toy, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "agent_loops.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "documented_loops.py").write_text(code)
    entry = "- {name: two_tries, _target_: documented_loops.TwoTries, remark: '+'}"
    (tmp_path / "loops.yaml").write_text(entry)
    monkeypatch.syspath_prepend(tmp_path)
    agent = "actor_rollout_ref.rollout.agent"
    _, trainer = toy_run(
        toy, tmp_path, f"{agent}.agent_loop_config_path={tmp_path / 'loops.yaml'}",
        f"{agent}.default_agent_loop=two_tries", "trainer.total_training_steps=1",
    )  # fmt: skip
    assert set(trainer.batch.non_tensor_batch["__num_turns__"]) <= {2, 3}


TARGETS = "actor_rollout_ref.model.target_modules=[nope]"
BUFFER = (
    "reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len={len} "
    "reward_model.overlong_buffer.penalty_factor=1.0"
)
TWO_RANKS = ["trainer.n_gpus_per_node=2", "trainer.controller=local"]
FILES_OF_USERS = """
def other_names(solution, truth): return 1.0
class NoDataset: pass
class NoSampler: pass
"""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["custom_reward_function.name=scores"], "custom_reward_function.*'scores'.*other_names"),
        (
            ["custom_reward_function.name=other_names"],
            r"other_names\(solution, truth\).*'solution'",
        ),
        (["custom_reward_function.reward_kwargs.bonux=1"], "compute_score.*'bonux'"),
        (["data.custom_cls.path=FILE", "data.custom_cls.name=NoDataset"], "subclass of torch"),
        (["data.sampler.class_path=FILE", "data.sampler.class_name=NoSampler"], "AbstractSampler"),
    ],
)
def test_what_a_users_file_lacks_ends_the_command_with_a_message(toy, tmp_path, changes, message):
    file = tmp_path / "mine.py"
    file.write_text(REWARD + FILES_OF_USERS)
    paths = [f"custom_reward_function.path={file}"]
    with pytest.raises(Misuse, match=message):
        toy_run(toy, tmp_path, *paths, *[one.replace("FILE", str(file)) for one in changes])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def compute_score(a b): pass", r"SyntaxError: .*mine\.py, line 1"),
        ("\nimport no_such_package", r"No module named 'no_such_package' \(.*mine\.py, line 2\)"),
    ],
)
def test_code_that_fails_when_it_is_loaded_is_told_with_its_line(toy, tmp_path, code, message):
    file = tmp_path / "mine.py"
    file.write_text(code)
    with pytest.raises(Misuse, match=message):
        toy_run(toy, tmp_path, f"custom_reward_function.path={file}")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_model_that_cannot_be_read_is_named_by_its_folder(toy, tmp_path, num_ranks):
    model = Path(shutil.copytree(toy / "model", tmp_path / "cut_short"))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(BadData, match=r"cut_short cannot be loaded: .*header"):
        toy_run(
            toy,
            tmp_path,
            f"actor_rollout_ref.model.path={model}",
            f"trainer.n_gpus_per_node={num_ranks}",
            "trainer.controller=local",
        )


def test_a_language_model_as_a_reward_model_is_refused_without_a_traceback(toy, tmp_path):
    with pytest.raises(BadData, match=r"reward_model\.model\.path=.*has no score\.weight"):
        toy_run(
            toy,
            tmp_path,
            "reward_model.enable=True",
            f"reward_model.model.path={toy / 'model'}",
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.train_batch_size=32"], "24 rows and a batch needs 32"),
        (["actor_rollout_ref.model.external_lib=no_such_lib"], "external_lib.*'no_such_lib'"),
        (["actor_rollout_ref.model.lora_rank=4", TARGETS], "target_modules: .*nope"),
        (["actor_rollout_ref.model.lora_rank=4", TARGETS, *TWO_RANKS], "target_modules: .*nope"),
        (["reward_manager.name=dapo", *BUFFER.format(len=9).split()], "at most .*, which is 8"),
    ],
)
def test_what_a_run_cannot_be_built_from_is_refused(toy, tmp_path, changes, message):
    with pytest.raises(EndsTheRun, match=message):
        toy_run(toy, tmp_path, *changes)


def test_an_overlong_buffer_ends_at_the_longest_response_of_the_run(toy, tmp_path):
    steps, _ = toy_run(toy, tmp_path, "reward_manager.name=dapo", *BUFFER.format(len=4).split())
    assert steps[0]["critic/score/min"] < 0  # without the penalty 0 is the least


def test_messages_need_a_chat_template_and_without_one_the_run_is_refused(toy, tmp_path):
    message = {"role": "user", "content": "1+1="}
    rows = [{"prompt": [message], "data_source": "sevens", "answer": "7"}] * 8
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(EndsTheRun, match=r"no chat template; set data\.chat_template=chatml"):
        toy_run(toy, tmp_path, f"data.train_files={tmp_path / 'chat.jsonl'}")


def test_an_error_of_a_library_or_of_users_keeps_its_traceback():
    with pytest.raises(ValueError, match="invalid literal") as caught, refusing():
        int("x")
    assert not isinstance(caught.value, EndsTheRun)


MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
SERVER = {"mcpServers": {"mine": {"command": "/no/such/binary"}}}
ENTRY = """
tools:
  - class_name: {cls}
    config: {{type: {kind}, timeout: 5}}
    {rest}
"""
CALC = "tool_schema: {type: function, function: {name: calc, description: '', parameters: {}}}"


@pytest.mark.parametrize(
    ("entry", "changes", "message"),
    [
        ({"cls": "no_such_tools.Calc", "kind": "native", "rest": CALC}, [], "'no_such_tools'"),
        (
            {
                "cls": "verl.tools.mcp_base_tool.MCPBaseTool",
                "kind": "mcp",
                "rest": "mcp: {mcp_servers_config_path: FOLDER/servers.json}",
            },
            [],
            "no connection to MCP server 'mine'",
        ),
        (None, [f"{MULTI_TURN}.tool_server=http://127.0.0.1:9"], "127.0.0.1:9 does not list"),
        (None, ["actor_rollout_ref.rollout.agent.default_agent_loop=nope"], "agent loop 'nope'"),
    ],
)
def test_tools_that_cannot_be_had_end_the_run_with_a_message(
    toy, tmp_path, entry, changes, message
):
    (tmp_path / "servers.json").write_text(json.dumps(SERVER))
    changes = [f"{MULTI_TURN}.enable=True", "actor_rollout_ref.rollout.n=1", *changes]
    if entry is not None:
        text = ENTRY.format(**entry).replace("FOLDER", str(tmp_path))
        (tmp_path / "tools.yaml").write_text(text)
        changes.append(f"{MULTI_TURN}.tool_config_path={tmp_path / 'tools.yaml'}")
    with pytest.raises(EndsTheRun, match=message):
        toy_run(toy, tmp_path, *changes)
