"""What the data scripts for tools and simulated users write is trained on, with the YAML files of
`examples/sglang_multiturn`, their tools, servers and graders.

A few steps of GRPO through the whole trainer teach a model the right one of four phrases, of which
one is a call (`tests.speaking`).
"""

import asyncio
import json
import runpy
import sys
from pathlib import Path

import datasets
import pytest
import yaml

from tests.speaking import speaking_model, tool_call
from tests.toy import toy_run
from verl.tools.mcp_search_tool import MCPSearchTool
from verl.tools.tool_registry import initialize_tools_from_config
from verl.utils.import_utils import load_module

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = EXAMPLES / "sglang_multiturn" / "config"
GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "train.jsonl"
MCP_SERVER = Path(__file__).parents[1] / "tools" / "mcp_server.py"
TURNS = "actor_rollout_ref.rollout.multi_turn"
NUM_STEPS = 6

WORD_PROBLEMS = [
    {"question": f"A farm has {n} hens and {72 - n} ducks. How many birds?", "answer": "#### 72"}
    for n in range(30, 46)
]
SUMS = [
    {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"What is {n} + {42 - n}? Put it after Answer:."}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "42", "style": "rule"},
    }
    for n in range(16)
]
QUESTIONS = [
    {"question": f"who wrote letter {n}?", "golden_answers": ["Ann", "Ann B."], "data_source": "nq"}
    for n in range(16)
]
ANGLES = [{"images": [], "problem": f"{n} x = {7 * n}. Find x.", "answer": "7"} for n in range(16)]


CASES = {
    # script: raw rows, YAML, a call and words of the reply to it, the right answer, a wrong one
    "gsm8k_multiturn_w_tool": (
        WORD_PROBLEMS,
        "gsm8k_tool_config",
        tool_call("calc_gsm8k_reward", answer="72"),
        "Current parsed answer='#### 72' reward=1.0",
        "#### 72",
        "#### 71",
    ),
    "gsm8k_multiturn_w_interaction": (
        WORD_PROBLEMS,
        "gsm8k_interaction_config",
        "Let me see.",
        "Your response is incorrect!",
        "#### 72",
        "#### 71",
    ),
    "dapo_multiturn_w_tool": (
        SUMS,
        "sandbox_fusion_tool_config",
        tool_call("code_interpreter", code="print(6 * 7)"),
        "42",
        "Answer: 42",
        "Answer: 24",
    ),
    "preprocess_search_r1_dataset": (
        QUESTIONS,
        "search_tool_config",
        tool_call("search", query_list=["letter 3"]),
        "Ann wrote letter 3.",
        "<answer> Ann </answer>",
        "<answer> Bob </answer>",
    ),
    "geo3k_multiturn_w_tool": (
        ANGLES,
        "geo3k_tool_config",
        tool_call("calc_geo3k_reward", answer="7"),
        "reward=1.0",
        "\\boxed{7}",
        "\\boxed{8}",
    ),
}  # fmt: skip
CASES["gsm8k_tool_agent_loop"] = CASES["gsm8k_multiturn_w_tool"]
CASES["aime2024_multiturn_w_tool"] = CASES["dapo_multiturn_w_tool"]


@pytest.fixture(autouse=True)
def _paths(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.syspath_prepend(str(EXAMPLES / "data_preprocess"))


def raw_rows(script, rows):
    """Rows of GSM8K itself where it is here: those with the one answer that the model knows."""
    if not (script.startswith("gsm8k") and GSM8K.exists()):
        return rows
    found = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    return [row for row in found if row["answer"].endswith("\n#### 72")][:16]


def settings_of(yaml_name, tmp_path, url):
    """The example's own file; only the address of the search service is that of this test."""
    if yaml_name == "gsm8k_interaction_config":
        path = CONFIG / "interaction_config" / f"{yaml_name}.yaml"
        return [f"{TURNS}.interaction_config_path={path}", f"{TURNS}.max_user_turns=2"]
    path = CONFIG / "tool_config" / f"{yaml_name}.yaml"
    if yaml_name == "search_tool_config":
        config = yaml.safe_load(path.read_text())
        config["tools"][0]["config"]["retrieval_service_url"] = f"{url}/retrieve"
        path = tmp_path / "tools.yaml"
        path.write_text(yaml.safe_dump(config))
    return [f"{TURNS}.tool_config_path={path}", f"{TURNS}.max_assistant_turns=3"]


@pytest.fixture
def search_service(monkeypatch):
    server = load_module(str(EXAMPLES / "search" / "retrieval_server.py"))
    passages = [{"id": n, "contents": f"letter {n}\nAnn wrote letter {n}."} for n in range(16)]
    with server.make_server(passages) as running:
        monkeypatch.setenv("VERL_RETRIEVAL_TOKEN", running.token)
        yield running.url


@pytest.mark.slow
@pytest.mark.parametrize("script", CASES)
def test_what_a_script_writes_trains(script, tmp_path, monkeypatch, search_service):
    rows, yaml_name, call, reply, right, wrong = CASES[script]
    raw = tmp_path / "raw"
    raw.mkdir()
    lines = [json.dumps(row) for row in raw_rows(script, rows)]
    assert len(lines) == 16
    (raw / "train.jsonl").write_text("\n".join(lines) + "\n")
    command = [script, "--local_dataset_path", str(raw), "--local_save_dir", str(tmp_path / "data")]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(EXAMPLES / "data_preprocess" / f"{script}.py"), run_name="__main__")
    speaking_model(tmp_path / "model", [call, right, wrong, "..."])
    steps, _ = toy_run(
        tmp_path,
        tmp_path / "out",
        f"data.train_files={tmp_path / 'data' / 'train.parquet'}",
        f"data.val_files={tmp_path / 'data' / 'train.parquet'}",
        "data.max_prompt_length=1536",
        "data.max_response_length=512",
        "custom_reward_function.path=null",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.optim.lr=0.005",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        f"{TURNS}.enable=true",
        *settings_of(yaml_name, tmp_path, search_service),
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.total_epochs=10",
        "trainer.val_before_train=true",
        f"trainer.test_freq={NUM_STEPS}",
        f"trainer.rollout_data_dir={tmp_path / 'said'}",
    )
    steps = [step for step in steps if "critic/score/mean" in step]
    assert len(steps) == NUM_STEPS
    first, last = steps[:2], steps[-2:]
    learnt = sum(s["critic/score/mean"] for s in last) - sum(s["critic/score/mean"] for s in first)
    assert learnt > 0.3, "the right answer is not learnt"
    assert max(step["training/rollout_probs_diff_max"] for step in steps) < 1e-4
    lines = (tmp_path / "said" / "1.jsonl").read_text().splitlines()
    said = [json.loads(line)["output"] for line in lines]
    assert any(reply in text.partition(call)[2] for text in said), said


def test_the_tools_of_an_mcp_server_are_listed_as_its_file_says(tmp_path):
    """The server itself runs over standard input here; its file names an address."""
    server = {"command": sys.executable, "args": [str(MCP_SERVER)]}
    servers = json.loads((CONFIG / "tool_config" / "mcp_server.json").read_text())
    assert list(servers) == ["mcpServers"]
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"search": server}}))
    config = yaml.safe_load((CONFIG / "tool_config" / "mcp_tool_config.yaml").read_text())
    (entry,) = config["tools"]
    assert (
        Path(entry["mcp"]["mcp_servers_config_path"])
        .resolve()
        .samefile(CONFIG / "tool_config" / "mcp_server.json")
    )
    entry["mcp"]["mcp_servers_config_path"] = str(tmp_path / "servers.json")
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump(config))
    tools = {tool.name: tool for tool in initialize_tools_from_config(str(tmp_path / "tools.yaml"))}
    try:
        assert type(tools["add"]) is MCPSearchTool
        response, _, _ = asyncio.run(tools["add"].execute("instance", {"a": 2}))
        assert response.text == "3"
    finally:
        for tool in tools.values():
            tool.close()
