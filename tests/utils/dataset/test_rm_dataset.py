import json

import pytest
import torch

from examples.quickstart.build_model import build_tokenizer
from verl.utils.dataset.rm_dataset import RMDataset


def dataset(tmp_path, rows, **options):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RMDataset(str(file), build_tokenizer(), cache_dir=str(tmp_path), **options)


def texts(row):
    made = build_tokenizer()
    pairs = zip(row["input_ids"], row["attention_mask"], strict=True)
    return [made.decode(ids[mask.bool()]) for ids, mask in pairs]


PAIR = {"prompt": "1+1", "chosen": "2", "rejected": "11"}


def test_a_pair_is_the_prompt_with_either_response_and_its_end(tmp_path):
    row = dataset(tmp_path, [PAIR], max_length=12)[0]
    assert texts(row) == ["<|user|>1+1<|assistant|>2</s>", "<|user|>1+1<|assistant|>11</s>"]
    assert row["input_ids"].shape == (2, 12)
    assert row["position_ids"][0].tolist() == [0, 1, 2, 3, 4, 5, 6] + [0] * 5


def test_the_end_can_be_left_out_and_columns_can_be_named(tmp_path):
    rows = [{"question": "1+1", "good": "2", "bad": "3"}]
    names = {"prompt_key": "question", "chosen_key": "good", "rejected_key": "bad"}
    row = dataset(tmp_path, rows, max_length=12, add_eos=False, **names)[0]
    assert texts(row)[0] == "<|user|>1+1<|assistant|>2"


def test_a_long_pair_keeps_its_end(tmp_path):
    row = dataset(tmp_path, [PAIR], max_length=4)[0]
    assert texts(row) == ["1<|assistant|>2</s>", "<|assistant|>11</s>"]
    assert torch.equal(row["attention_mask"], torch.ones(2, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({**PAIR, "chosen": None}, "chosen is None; it must be text"),
        ({**PAIR, "prompt": ""}, "prompt is empty"),
        ({"prompt": "1", "chosen": "2"}, "has no column 'rejected'"),
    ],
)
def test_a_bad_pair_is_named(tmp_path, caplog, bad, reason):
    assert len(dataset(tmp_path, [PAIR] * 150 + [bad])) == 150
    assert f"pairs.jsonl:151: {reason}" in caplog.text
