import json
import logging
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf

from tests.tiny_tokenizer import tiny_tokenizer
from verl.config.data import CustomClassConfig, DataConfig
from verl.utils.dataset import RLHFDataset, collate_fn
from verl.utils.dataset.rl_dataset import get_dataset_class
from verl.utils.dataset.tables import DataError


def row(prompt="1+1=", **more):
    return {"prompt": prompt, "data_source": "sums", "answer": "2", **more}


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def json_lines(path, rows):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    return str(path)


def dataset(files, max_samples=-1, **options):
    config = DataConfig(**{"max_prompt_length": 8, **options})
    return RLHFDataset(files, tiny_tokenizer(), config, max_samples=max_samples)


# ---- formats -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["parquet", "json", "jsonl"])
def test_every_file_format_gives_the_same_rows(tmp_path, form):
    rows = [row("1+1="), row("2+2=", answer="4")]
    path = tmp_path / f"data.{form}"
    if form == "parquet":
        parquet(path, rows)
    elif form == "json":
        path.write_text(json.dumps(rows))
    else:
        json_lines(path, rows)
    made = dataset(str(path))
    assert [entry["raw_prompt"] for entry in made] == ["1+1=", "2+2="]
    assert [entry["reward_model"]["ground_truth"] for entry in made] == ["2", "4"]


@pytest.mark.parametrize("agent_name", ["env_agent", "tool_agent"])
def test_rows_whose_world_gives_the_reward_need_no_scorer(tmp_path, agent_name):
    path = json_lines(tmp_path / "data.jsonl", [row("2+2=", agent_name=agent_name)])

    def load():
        config = DataConfig(max_prompt_length=8, cache_dir=str(tmp_path))
        return RLHFDataset(path, tiny_tokenizer(), config, grading_fault=lambda *_: "no scorer")

    if agent_name == "env_agent":
        assert len(load()) == 1
    else:
        with pytest.raises(DataError, match="no scorer"):
            load()


def test_several_files_are_one_dataset(tmp_path):
    files = [
        parquet(tmp_path / "a.parquet", [row("a=")] * 2),
        json_lines(tmp_path / "b.jsonl", [row("b=")]),
    ]
    assert [entry["raw_prompt"] for entry in dataset(files)] == ["a=", "a=", "b="]


def test_a_row_has_what_agent_loops_and_rewards_need(tmp_path):
    extra = {"index": 7, "tools_kwargs": {"calc": {"create_kwargs": {"x": 1}}}, "split": "train"}
    messages = [{"role": "user", "content": "1+1="}]
    stated = {"style": "rule", "ground_truth": "2"}
    entry = dataset(
        parquet(
            tmp_path / "a.parquet",
            [
                {
                    "prompt": messages,
                    "data_source": "sums",
                    "reward_model": stated,
                    "extra_info": extra,
                }
            ],
        ),
        truncation="left",
    )[0]
    assert entry["raw_prompt"] == messages
    assert entry["reward_model"] == stated
    assert entry["index"] == 7
    assert entry["tools_kwargs"] == {"calc": {"create_kwargs": {"x": 1}}}
    assert entry["interaction_kwargs"] == {}
    assert entry["data_source"] == "sums"
    assert isinstance(entry["dummy_tensor"], torch.Tensor)
    assert "prompt" not in entry


@pytest.mark.parametrize(
    "answer",
    [
        {"reward_model": {"ground_truth": "2"}},
        {"reward_model": {"style": "rule", "ground_truth": "2"}, "answer": "other"},
        {"answer": "2"},
        {"ground_truth": "2", "answer": "the solution is 2"},
    ],
)
def test_the_answer_is_found_wherever_the_file_has_it(tmp_path, answer):
    path = json_lines(tmp_path / "a.jsonl", [{"prompt": "1+1=", **answer}])
    entry = dataset(path)[0]
    assert entry["reward_model"]["ground_truth"] == "2"
    assert entry["data_source"] == "unknown"


def test_a_row_may_have_no_answer(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [{"prompt": "write a poem"}])
    assert dataset(path, truncation="left")[0]["reward_model"]["ground_truth"] is None


def test_other_columns_can_be_named(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [{"question": "1+1=", "kind": "sums"}])
    entry = dataset(path, prompt_key="question", reward_fn_key="kind")[0]
    assert (entry["raw_prompt"], entry["data_source"]) == ("1+1=", "sums")


def test_ids_and_text_are_added_on_request(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [row("1+1=")])
    entry = dataset(path, return_raw_input_ids=True, return_full_prompt=True)[0]
    assert entry["raw_prompt_ids"] == tiny_tokenizer()("1+1=").input_ids
    assert entry["full_prompts"] == "1+1="


# ---- how many rows -------------------------------------------------------------------------------


def test_a_limit_takes_the_first_rows_or_random_ones_that_do_not_change(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [row(f"{i}=") for i in range(50)])
    first = dataset(path, max_samples=3, shuffle=False)
    assert [entry["raw_prompt"] for entry in first] == ["0=", "1=", "2="]
    drawn = [entry["raw_prompt"] for entry in dataset(path, max_samples=3, seed=5)]
    assert drawn == [entry["raw_prompt"] for entry in dataset(path, max_samples=3, seed=5)]
    assert drawn != ["0=", "1=", "2="]


def test_long_prompts_are_left_out_where_the_configuration_says_so(tmp_path, caplog):
    path = json_lines(tmp_path / "a.jsonl", [row("12345678"), row("123456789"), row("1" * 10**6)])
    made = dataset(path, filter_overlong_prompts=True)
    assert [entry["raw_prompt"] for entry in made] == ["12345678"]
    assert "2 of 3 prompts are longer than data.max_prompt_length (8)" in caplog.text


def test_a_long_prompt_is_an_error_at_the_start_and_not_in_the_middle_of_a_run(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [row("ok="), row("123456789")])
    with pytest.raises(
        DataError, match=r"1 of 2 prompts are too long, the first at .*a\.jsonl:2: "
    ):
        dataset(path)
    assert len(dataset(path, truncation="right")) == 2


def test_nothing_left_is_an_error(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [row("123456789")])
    with pytest.raises(DataError, match=r"no prompt of .* is left after filtering"):
        dataset(path, filter_overlong_prompts=True)


def test_repeated_prompts_are_counted(tmp_path, caplog):
    dataset(json_lines(tmp_path / "a.jsonl", [row(), row(), row("2="), row()]))
    assert "2 of 4 prompts repeat an earlier one" in caplog.text


def test_a_dataset_can_be_split(tmp_path):
    made = dataset(json_lines(tmp_path / "a.jsonl", [row(f"{i}=") for i in range(5)]))
    parts = made.split(2)
    assert [[e["raw_prompt"] for e in part] for part in parts] == [["0=", "1=", "2="], ["3=", "4="]]


# ---- bad data ------------------------------------------------------------------------------------

BAD_ROWS = {
    "no prompt": ({"question": "x"}, "has no column 'prompt'"),
    "null prompt": (row(None), "prompt is null"),
    "empty prompt": (row(""), "prompt is empty"),
    "number": (row(7), "is int; it must be a text or a list of messages"),
    "no messages": (row([]), "has no messages"),
    "nested lists": (row([["x"]]), "message 0 is no mapping with role and content"),
    "no content": (row([{"role": "user"}]), "message 0 is no mapping"),
    "strange content": (row([{"role": "user", "content": 3}]), "content that is int"),
    "strange role": (row([{"role": 3, "content": "x"}]), "role that is int"),
    "half a surrogate": (
        row("a\ud800b"),
        "is not valid Unicode: it holds half of a surrogate pair",
    ),
    "NaN answer": (row(answer=float("nan")), "has NaN for an answer"),
    "text for extra_info": (row(extra_info="x"), "extra_info is str, not a mapping"),
    "a list": ([1, 2], "is list, not an object with columns"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_one_bad_row_in_many_is_left_out_by_name(tmp_path, caplog, name):
    bad, reason = BAD_ROWS[name]
    path = json_lines(
        tmp_path / "a.jsonl", [row(f"{i}=") for i in range(150)][:99] + [bad] + [row()] * 50
    )
    with caplog.at_level(logging.WARNING):
        assert len(dataset(path)) == 149
    assert "1 of 150 rows are left out" in caplog.text
    assert f"{path}:100: " in caplog.text
    assert reason in caplog.text


def test_one_bad_row_in_a_hundred_stops_the_run_with_a_report(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [row(f"{i}=") for i in range(99)] + [row(None)])
    with pytest.raises(
        DataError, match=r"1 of 100 rows are bad.*\n.*a\.jsonl:100: prompt is null"
    ) as stop:
        dataset(path)
    assert stop.value.exit_code == 65


def test_a_line_that_is_no_json_is_named(tmp_path, caplog):
    path = json_lines(tmp_path / "a.jsonl", [row()] * 150)
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"prompt": \n')
    assert len(dataset(path)) == 150
    assert f"{path}:151: is not readable JSON" in caplog.text


def test_text_that_is_not_utf8_is_named_and_the_rows_around_it_are_kept(tmp_path, caplog):
    column = pa.array([b"1=", b"\xff\xfe", b"3="] + [b"4="] * 200, pa.binary()).view(pa.string())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": column}), path)
    made = dataset(str(path))
    assert [made[0]["raw_prompt"], made[1]["raw_prompt"], len(made)] == ["1=", "3=", 202]
    assert f"{path}:2: cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.parquet", b"not a parquet file", "not a readable parquet file"),
        ("a.parquet", b"PAR1" + b"\0" * 40, "not a readable parquet file"),
        ("a.json", b"[{", "not readable JSON"),
        ("a.csv", b"a,b", "neither .parquet nor .json nor .jsonl"),
        ("a.jsonl", b"", "there are no rows in .*a.jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        dataset(str(tmp_path / name))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        dataset(str(tmp_path / "none.parquet"))


# ---- around it -----------------------------------------------------------------------------------


def test_rows_become_columns_and_missing_values_none():
    columns = collate_fn([{"a": torch.tensor([1]), "b": [1]}, {"a": torch.tensor([2]), "c": "x"}])
    assert columns["a"].tolist() == [[1], [2]]
    assert isinstance(columns["b"], np.ndarray)
    assert columns["b"].tolist() == [[1], None]
    assert columns["c"].tolist() == [None, "x"]


def test_a_programs_own_configuration_may_leave_options_out(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [row()])
    config = OmegaConf.create({"max_prompt_length": 8, "filter_overlong_prompts": True})
    assert len(RLHFDataset(path, tiny_tokenizer(), config)) == 1


def test_a_dataset_class_of_ones_own_is_loaded_from_its_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from verl.utils.dataset import RLHFDataset\n"
        "class Mine(RLHFDataset): pass\n"
        "class Not: pass\n"
    )
    path = str(tmp_path / "mine.py")
    config = DataConfig(custom_cls=CustomClassConfig(path=path, name="Mine"))
    assert issubclass(get_dataset_class(config), RLHFDataset)
    assert get_dataset_class(DataConfig()) is RLHFDataset
    with pytest.raises(TypeError, match=r"must be a subclass of torch\.utils\.data\.Dataset"):
        get_dataset_class(DataConfig(custom_cls=CustomClassConfig(path=path, name="Not")))


# ---- what rows offer, and what prompts are measured with -----------------------------------------


def test_a_row_computes_the_columns_of_older_datasets_when_it_is_asked(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [row("1+1=")])
    entry = dataset(path)[0]
    assert "input_ids" not in list(entry)
    ids = tiny_tokenizer()("1+1=").input_ids
    assert entry["input_ids"].tolist() == [0] * 4 + ids
    assert entry["attention_mask"].tolist() == [0] * 4 + [1] * 4
    assert entry["position_ids"].tolist() == [0] * 4 + [0, 1, 2, 3]
    assert (entry["raw_prompt_ids"], entry["full_prompts"]) == (ids, "1+1=")
    with pytest.raises(KeyError):
        entry["nothing"]
    assert "input_ids" not in pickle.loads(pickle.dumps(dataset(path)[0]))


@pytest.mark.parametrize(("side", "kept"), [("left", "3456789="), ("right", "12345678")])
def test_older_columns_are_cut_as_truncation_says(tmp_path, side, kept):
    path = json_lines(tmp_path / "a.jsonl", [row("123456789=")])
    entry = dataset(path, truncation=side)[0]
    assert entry["input_ids"].tolist() == tiny_tokenizer()(kept).input_ids


def test_tools_count_when_prompts_are_measured(tmp_path, caplog):
    tools = tmp_path / "tools.yaml"
    schema = "{type: function, function: {name: calc, description: null}}"
    tools.write_text(f"tools:\n  - {{class_name: a.B, config: {{}}, tool_schema: {schema}}}\n")
    path = json_lines(tmp_path / "a.jsonl", [row("12345")])
    template = (
        "{% for t in tools or [] %}{{ t['function']['name'] }}{% endfor %}{{ messages[0].content }}"
    )
    options = {"chat_template": template, "filter_overlong_prompts": True}
    assert len(dataset(path, **options)) == 1
    with pytest.raises(DataError, match="no prompt of"):  # "calc12345" is one too long
        dataset(path, tool_config_path=str(tools), **options)
    functions = tmp_path / "measured_tools.py"
    functions.write_text(
        "from verl.tools.function_tool import function_tool\n"
        "@function_tool\ndef sums():\n    pass\n"
    )
    with pytest.raises(DataError, match="no prompt of"):
        dataset(path, function_tool_path=str(functions), **options)
    tools.write_text("tools: [{class_name: a.B, config: {type: mcp}}]")
    assert len(dataset(path, tool_config_path=str(tools), **options)) == 1
    assert "tools of servers do not count in the length of prompts" in caplog.text
    tools.write_text("nothing: 1")
    with pytest.raises(DataError, match="must hold `tools:` with a list"):
        dataset(path, tool_config_path=str(tools))


def test_a_row_that_needs_tools_kwargs_and_has_none_is_noticed(tmp_path, caplog):
    path = json_lines(tmp_path / "a.jsonl", [row(extra_info={"need_tools_kwargs": True})])
    dataset(path)[0]
    assert f"{path}:1 needs tools_kwargs and has none" in caplog.text


def test_a_row_that_the_chat_template_refuses_is_a_bad_row(tmp_path, caplog):
    template = (
        "{% if messages[0].content == 'no' %}{{ raise_exception('roles must alternate') }}"
        "{% endif %}{{ messages[0].content }}"
    )
    rows = [row(f"{i}=") for i in range(150)]
    path = json_lines(tmp_path / "a.jsonl", [*rows, row("no")])
    assert len(dataset(path, chat_template=template)) == 150
    assert f"{path}:151: roles must alternate" in caplog.text
    with pytest.raises(DataError, match=r"1 of 2 rows are bad(.|\n)*roles must alternate"):
        dataset(json_lines(tmp_path / "b.jsonl", [row(), row("no")]), chat_template=template)


def test_nulls_that_a_table_adds_to_messages_are_not_part_of_them(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "1"}]},
        {"prompt": [{"role": "user", "content": "2", "tool_calls": [{"name": "x"}]}]},
    ]
    made = dataset(parquet(tmp_path / "a.parquet", rows), truncation="left")
    assert made[0]["raw_prompt"] == [{"role": "user", "content": "1"}]


def test_repeated_ids_are_counted(tmp_path, caplog):
    ids = [{"index": number, "split": "train"} for number in (1, 2, 1)]
    rows = [row(f"{place}=", extra_info=extra) for place, extra in enumerate(ids)]
    dataset(json_lines(tmp_path / "a.jsonl", rows))
    assert "1 of 3 ids repeat an earlier one" in caplog.text


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_pickled_dataset_opens_its_files_again(tmp_path, form):
    rows = [row(f"{number}=") for number in range(2000)]
    write = parquet if form == "parquet" else json_lines
    made = dataset(write(tmp_path / f"a.{form}", rows), max_samples=500)
    octets = pickle.dumps(made.dataframe)
    assert len(octets) < 500 * 8 + 2000, "row numbers, no rows"
    again = pickle.loads(pickle.dumps(made))
    assert [again[i]["raw_prompt"] for i in (0, 499)] == [made[i]["raw_prompt"] for i in (0, 499)]


@pytest.mark.slow
def test_prompts_are_measured_in_several_processes_with_the_same_result(tmp_path):
    rows = [row("1" * (1 + number % 12) + "é=") for number in range(700)]
    path = json_lines(tmp_path / "a.jsonl", rows)
    options = {"filter_overlong_prompts": True}
    alone = dataset(path, **options)
    together = dataset(path, filter_overlong_prompts_workers=2, **options)
    assert len(alone) < 700
    assert together.dataframe.numbers.tolist() == alone.dataframe.numbers.tolist()


def test_a_subclass_may_read_its_rows_with_another_library(tmp_path):
    datasets = pytest.importorskip("datasets")

    class Mine(RLHFDataset):
        def _read_files_and_tokenize(self):
            rows = [{"prompt": [{"role": "user", "content": str(n)}]} for n in range(4)]
            self.dataframe = self.maybe_filter_out_long_prompts(datasets.Dataset.from_list(rows))

    config = DataConfig(truncation="left")
    made = Mine("unused.parquet", tiny_tokenizer(), config)
    assert [entry["raw_prompt"][0]["content"] for entry in made] == ["0", "1", "2", "3"]
    assert [len(part) for part in made.split(3)] == [2, 1, 1]


def test_messages_that_no_template_can_write_are_named_with_their_place(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    messages = [{"role": "user", "content": "1+1="}]
    file = json_lines(tmp_path / "mixed.jsonl", [row(), row(messages)])
    with pytest.raises(ValueError, match=r"mixed\.jsonl:2: the prompt is a list of messages"):
        RLHFDataset(file, tokenizer, DataConfig(max_prompt_length=8))
