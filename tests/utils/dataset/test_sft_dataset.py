import json
import logging
import re

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from omegaconf import OmegaConf

from examples.quickstart.build_model import build_tokenizer
from verl.config.sft import SFTDataConfig
from verl.utils.dataset.sft_dataset import SFTDataset, trained_tokens


def write(path, rows):
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def dataset(tmp_path, rows, max_samples=-1, **options):
    file = write(tmp_path / "rows.parquet", rows)
    options = {"prompt_key": "prompt", "response_key": "response", "max_length": 16, **options}
    return SFTDataset(file, build_tokenizer(), SFTDataConfig(**options), max_samples)


def text(row, mask):
    return build_tokenizer().decode(row["input_ids"][mask.bool()])


def test_a_plain_prompt_becomes_a_user_turn_and_the_response_ends(tmp_path):
    row = dataset(tmp_path, [{"prompt": "1+2", "response": "3"}])[0]
    assert text(row, row["attention_mask"]) == "<|user|>1+2<|assistant|>3</s>"
    assert row["attention_mask"].tolist() == [1] * 7 + [0] * 9
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 4, 5, 6] + [0] * 9


def test_the_mask_trains_the_response_and_its_end_but_no_prompt_token(tmp_path):
    row = dataset(tmp_path, [{"prompt": "1+2", "response": "34"}])[0]
    # <|user|> 1 + 2 <|assistant|> 3 4 </s>: predictions made at <|assistant|>, 3 and 4 count
    assert row["loss_mask"].tolist() == [0, 0, 0, 0, 1, 1, 1, 0] + [0] * 8
    labels, mask = row["input_ids"][1:], row["loss_mask"][:-1]
    assert build_tokenizer().decode(labels[mask.bool()]) == "34</s>"
    assert text(row, trained_tokens(row["loss_mask"])) == "34</s>"


def test_a_templated_prompt_is_taken_word_for_word(tmp_path):
    templated = dataset(tmp_path, [{"prompt": "<|user|>1+2<|assistant|>", "response": "3"}])[0]
    plain = dataset(tmp_path, [{"prompt": "1+2", "response": "3"}])[0]
    assert all(torch.equal(templated[name], plain[name]) for name in plain)


def test_a_templated_response_gets_no_second_end(tmp_path):
    row = dataset(tmp_path, [{"prompt": "1", "response": "3</s>"}])[0]
    assert text(row, row["attention_mask"]) == "<|user|>1<|assistant|>3</s>"


def test_a_prompt_may_be_a_list_of_messages(tmp_path):
    turns = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    row = dataset(tmp_path, [{"prompt": turns, "response": "4"}])[0]
    whole = "<|user|>1<|assistant|>2</s><|user|>3<|assistant|>4</s>"
    assert text(row, row["attention_mask"]) == whole
    assert text(row, trained_tokens(row["loss_mask"])) == "4</s>"


def test_a_templated_prompt_without_the_assistants_turn_is_noticed(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        dataset(tmp_path, [{"prompt": "<|user|>1+2", "response": "3"}])
    assert "start of the assistant's turn" in caplog.text


def test_keys_lead_into_dict_columns(tmp_path):
    rows = [{"extra_info": {"question": {"text": "1+2"}, "answer": "3"}}]
    options = {"prompt_key": "extra_info", "response_key": "extra_info"}
    inside = dataset(
        tmp_path,
        rows,
        **options,
        prompt_dict_keys=["question", "text"],
        response_dict_keys=["answer"],
    )
    assert text(inside[0], inside[0]["attention_mask"]) == "<|user|>1+2<|assistant|>3</s>"
    with pytest.raises(ValueError, match=r"rows.parquet:1: has no 'solution' .* question, answer"):
        dataset(tmp_path, rows, **options, prompt_dict_keys=["solution"])


@pytest.mark.parametrize(
    ("side", "max_length", "kept"), [("left", 5, "3456</s>"), ("right", 3, "<|user|>12")]
)
def test_long_rows_are_cut_on_the_side_that_truncation_names(tmp_path, side, max_length, kept):
    rows = [{"prompt": "12", "response": "3456"}]
    row = dataset(tmp_path, rows, max_length=max_length, truncation=side)[0]
    assert text(row, row["attention_mask"]) == kept
    assert row["loss_mask"][-1] == 0


def test_what_truncation_cut_off_is_not_trained(tmp_path):
    rows = [{"prompt": "12", "response": "3456"}]
    row = dataset(tmp_path, rows, max_length=6, truncation="right")[0]
    assert text(row, row["attention_mask"]) == "<|user|>12<|assistant|>34"
    assert text(row, trained_tokens(row["loss_mask"])) == "34"


def test_a_row_that_is_too_long_is_named(tmp_path):
    rows = [{"prompt": "1", "response": "2"}, {"prompt": "1" * 20, "response": "2"}]
    data = dataset(tmp_path, rows)
    message = r"rows.parquet:2 has 24 tokens, more than data.max_length=16.*truncation"
    with pytest.raises(NotImplementedError, match=message):
        data[1]
    with pytest.raises(NotImplementedError, match=message):
        data.check_lengths()


def test_a_missing_column_is_named_with_the_closest_one(tmp_path):
    rows = [{"prompt": "1", "respons": "2"}]
    message = r"has no column 'response' \(data.response_key\); did you mean 'respons'\? It has:"
    with pytest.raises(ValueError, match=message):
        dataset(tmp_path, rows)


def test_a_file_without_rows_is_refused(tmp_path):
    file = tmp_path / "empty.parquet"
    schema = pa.schema([("prompt", pa.string()), ("response", pa.string())])
    parquet.write_table(schema.empty_table(), file)
    config = SFTDataConfig(prompt_key="prompt", response_key="response")
    with pytest.raises(ValueError, match=r"no rows in .*empty.parquet"):
        SFTDataset(str(file), build_tokenizer(), config)


BAD_ROWS = {
    "no response": ({"prompt": "1", "response": None}, "the response is None; it must be text"),
    "no prompt": ({"prompt": None, "response": "1"}, "the prompt is null"),
    "no messages": ({"prompt": [], "response": "1"}, "the prompt has no messages"),
    "a dict": ({"prompt": {"a": "1"}, "response": "1"}, "the prompt is dict.*prompt_dict_keys"),
    "another column": ({"prompt": "1", "answer": "2"}, "has no column 'response'.*It has: prompt"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_left_out_by_name_and_too_many_stop_the_run(tmp_path, caplog, name):
    bad, reason = BAD_ROWS[name]
    config = {"prompt_key": "prompt", "response_key": "response", "max_length": 8}
    file = tmp_path / "rows.jsonl"
    good = json.dumps({"prompt": "1", "response": "2"}) + "\n"
    file.write_text(good * 150 + json.dumps(bad) + "\n")
    assert len(SFTDataset(str(file), build_tokenizer(), config)) == 150
    assert re.search(f"rows.jsonl:151: {reason}", caplog.text)
    file.write_text(good + json.dumps(bad) + "\n")
    with pytest.raises(ValueError, match=f"1 of 2 rows are bad(.|\n)*rows.jsonl:2: {reason}"):
        SFTDataset(str(file), build_tokenizer(), config)


def test_files_follow_each_other_and_max_samples_takes_the_first_rows(tmp_path):
    first = write(tmp_path / "a.parquet", [{"prompt": "1", "response": "a"}])
    second = write(tmp_path / "b.parquet", [{"prompt": c, "response": c} for c in "23"])
    config = {"prompt_key": "prompt", "response_key": ["response"], "max_length": 8}
    whole = SFTDataset([first, second], build_tokenizer(), OmegaConf.create(config))
    assert [row["prompt"] for row in whole.rows] == ["1", "2", "3"]
    assert whole.rows.location(2) == f"{second}:2"
    assert len(SFTDataset([first, second], build_tokenizer(), config, max_samples=2)) == 2


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    file = write(tmp_path / "rows.parquet", [{"prompt": "1", "response": "2"}])
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        SFTDataset(file, tokenizer, {"prompt_key": "prompt", "response_key": "response"})


def test_a_folder_may_be_given_for_the_tokenizer(tmp_path):
    build_tokenizer().save_pretrained(tmp_path / "model")
    file = write(tmp_path / "rows.parquet", [{"prompt": "1", "response": "2"}])
    config = {"prompt_key": "prompt", "response_key": "response", "max_length": 8}
    row = SFTDataset(file, str(tmp_path / "model"), config)[0]
    assert text(row, row["attention_mask"]) == "<|user|>1<|assistant|>2</s>"
