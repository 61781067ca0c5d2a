"""The examples with tools: what fine-tuning shows a model is what the agent loop makes of it.

The model is a script that says the turns of a demonstration; tools, servers and the sandbox are
those of the examples.
"""

import json
import sqlite3
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import yaml
from transformers import AutoTokenizer

from benchmarks.recipe_curves import run_one
from recipe.retool.retool import CustomRLHFDataset
from tests.agent_loop.scripted import ScriptedRollout, run_loop, turns_config
from tests.templates import template_tokenizer
from verl.tools.leases import ToolSet
from verl.tools.parsers import FunctionCall
from verl.tools.tool_registry import initialize_tools_from_config
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.import_utils import load_module

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = EXAMPLES / "sglang_multiturn" / "config" / "tool_config"


@pytest.fixture
def example(monkeypatch, tmp_path):
    """Prepare an example in a folder, with few conversations; give the module of `prepare.py`."""

    def prepare(name, **sizes):
        monkeypatch.syspath_prepend(str(EXAMPLES / name))
        module = load_module(str(EXAMPLES / name / "prepare.py"))
        for size, value in sizes.items():
            monkeypatch.setattr(module, size, value)
        module.prepare(tmp_path, 0)
        return module

    return prepare


def replayed(folder, tokenizer, tool_config):
    """Each demonstration that calls a tool: its ids and mask for fine-tuning, and those of the
    agent loop when a model says its turns."""
    rows = parquet.read_table(folder / "sft.parquet").to_pylist()
    shown = MultiTurnSFTDataset(str(folder / "sft.parquet"), tokenizer, {"max_length": 1000})
    assert len(rows) == len(shown)
    ends = tokenizer.eos_token
    for row, item in zip(rows, shown, strict=True):
        messages = row["messages"]
        start = next(i for i, one in enumerate(messages) if one["role"] == "assistant")
        if len(messages) - start < 3:
            continue
        said = [one["content"] + ends for one in messages[start:] if one["role"] == "assistant"]
        engine = ScriptedRollout(*said, tokenizer=tokenizer)
        output = run_loop(turns_config(tool_config_path=str(tool_config)), engine, messages[:start])
        num_prompt = len(output.prompt_ids)
        ids = item["input_ids"].tolist()
        ids = ids[: num_prompt + len(output.response_ids)]  # some templates end with a line break
        mask = item["loss_mask"].tolist()[num_prompt : len(ids)]
        yield ids, mask, output


def test_search_shows_what_the_loop_makes_of_it(example, tmp_path, monkeypatch):
    example("search", NUM_DEMONSTRATIONS=24)
    server = load_module(str(EXAMPLES / "search" / "retrieval_server.py"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    config = yaml.safe_load((CONFIG / "search_tool_config.yaml").read_text())
    with server.make_server(server.read_corpus(tmp_path / "corpus.jsonl")) as running:
        monkeypatch.setenv("VERL_RETRIEVAL_TOKEN", running.token)
        options = {"retrieval_service_url": f"{running.url}/retrieve", "topk": 1, "reply": "text"}
        config["tools"][0]["config"] |= options
        (tmp_path / "tools.yaml").write_text(yaml.safe_dump(config))
        compared = list(replayed(tmp_path, tokenizer, tmp_path / "tools.yaml"))
    assert len(compared) > 3
    for ids, mask, output in compared:
        assert output.prompt_ids + output.response_ids == ids
        assert output.response_mask == mask


def test_code_interpreter_shows_what_the_loop_makes_of_it(example, tmp_path):
    example("code_interpreter", NUM_SHOWN=8)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    compared = list(replayed(tmp_path, tokenizer, CONFIG / "sandbox_fusion_tool_config.yaml"))
    assert compared
    for ids, mask, output in compared:
        assert output.prompt_ids + output.response_ids == ids
        assert output.response_mask == mask


def test_the_prompts_of_retool_are_those_of_its_fine_tuning(example, tmp_path):
    example("code_interpreter", NUM_SHOWN=8, NUM_TRAIN=4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    config = {"max_prompt_length": 32, "filter_overlong_prompts": True}
    rows = CustomRLHFDataset([str(tmp_path / "train.parquet")], tokenizer, config)
    asked = rows[0]["raw_prompt"][-1]["content"]
    shown = parquet.read_table(tmp_path / "sft.parquet").to_pylist()[0]["messages"][0]["content"]
    assert len(rows) == 4
    assert asked.partition("\n")[2] == shown.partition("\n")[2] != ""
    assert len(tokenizer(asked)["input_ids"]) < 12, "the sentence is one token"


def test_sql_shows_what_the_loop_makes_of_it(example, tmp_path):
    module = example("sql", NUM_SHOWN=10)
    tokenizer = template_tokenizer("sql", module.CHAT_TEMPLATE)
    compared = list(replayed(tmp_path, tokenizer, tmp_path / "tools.yaml"))
    assert len(compared) == 10
    for ids, mask, output in compared:
        assert output.prompt_ids + output.response_ids == ids
        assert output.response_mask == mask


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("search", "<answer>417</answer>", "<answer>418</answer>"),
        ("code_interpreter", "\\boxed{417}", "\\boxed{4170}"),
        ("sql", "417\nAnswer: 417", "417"),
    ],
)
def test_the_reward_is_for_the_answer_and_not_for_the_tool(name, right, wrong):
    score = load_module(str(EXAMPLES / name / "reward.py")).compute_score
    found = score(name, right, "417")
    assert (found["score"], found["called"]) == (1.0, 0.0)
    assert score(name, f"<tool_call>{{}}</tool_call>417{wrong}", "417")["score"] <= 0.0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", ["retool", "search_r1"])
def test_fine_tuning_and_reinforcement_teach_to_use_the_tool(recipe):
    """Minutes: both parts by their commands; without a learning rate the second changes nothing."""
    _, (_, learnt) = ends(run_one(recipe, "trained", 0, None))
    (_, before), (_, stayed) = ends(run_one(recipe, "learning rate 0", 0, None))
    assert learnt > before + 0.3
    assert abs(stayed - before) < 0.15


def ends(run):
    return run["points"][0], run["points"][-1]


# ---- the SQL tool --------------------------------------------------------------------------------


@pytest.fixture
def sql(example, tmp_path):
    example("sql")
    (tool,) = initialize_tools_from_config(str(tmp_path / "tools.yaml"))
    tool.seconds, tool.max_rows = 0.2, 3
    tools = ToolSet([tool], max_response_length=4000)

    async def ask(*queries):
        async with tools.lease("row") as lease:
            outcomes = [
                await lease.call(FunctionCall(name="sql", arguments=json.dumps({"query": query})))
                for query in queries
            ]
        assert not tool._connections
        return [(outcome.kind, outcome.response.text) for outcome in outcomes]

    yield ask
    tools.close()


async def test_the_answers_of_the_questions_are_those_of_the_tool(sql, tmp_path):
    rows = parquet.read_table(tmp_path / "sft.parquet").to_pylist()[:20]
    calls = [row["messages"][2]["content"] for row in rows]
    queries = [
        json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"]
        for call in calls
    ]
    replies = await sql(*(query["query"] for query in queries))
    assert replies == [("reply", row["messages"][3]["content"]) for row in rows]


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT COUNT(*) FROM n"
JOINS = ", ".join(f"city AS c{i}" for i in range(8))


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("DROP TABLE city", "not authorized"),
        ("INSERT INTO city VALUES ('x', 'y', 1)", "not authorized"),
        ("ATTACH '/etc/passwd' AS p", "not authorized"),
        ("PRAGMA query_only = 0", "not authorized"),
        ("SELECT load_extension('x')", "not authorized"),
        (ENDLESS, "not authorized"),
        (f"SELECT COUNT(*) FROM {JOINS}", "took longer than 0.2 s"),
        ("SELECT zeroblob(100000000)", "too big"),
        ("SELECT nowhere FROM city", "no such column"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("SELECT " + "1" * 3000, "at most 2000 characters"),
    ],
)
async def test_a_query_that_is_not_allowed_is_told_and_the_next_one_works(
    sql, tmp_path, query, told
):
    before = (tmp_path / "world.db").read_bytes()
    refused, after = await sql(query, "SELECT COUNT(*) FROM country")
    assert refused[0] == "refused"
    assert told in refused[1]
    assert after == ("reply", "24")
    assert (tmp_path / "world.db").read_bytes() == before


async def test_rows_are_limited(sql):
    ((kind, text),) = await sql("SELECT name FROM city")
    assert kind == "reply"
    assert text.splitlines()[3:] == ["(only the first 3 rows are shown)"]
    assert await sql("SELECT name FROM city WHERE name = ''") == [("reply", "(no rows)")]


def test_the_database_of_questions_is_consistent(sql, tmp_path):
    connection = sqlite3.connect(tmp_path / "world.db")
    counts = [
        connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
        for table in ("country", "city", "river")
    ]
    connection.close()
    assert counts == [24, 240, 120]
    files = {name: parquet.read_table(tmp_path / f"{name}.parquet") for name in ("train", "test")}
    asked = [row["prompt"][1]["content"] for t in files.values() for row in t.to_pylist()]
    assert len(set(asked)) == len(asked)
