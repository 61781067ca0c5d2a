import json

import pytest
import torch

from examples.quickstart.build_model import build_tokenizer
from verl.utils.dataset.rm_dataset import RMDataset
from verl.utils.dataset.sft_dataset import RowTooLong
from verl.utils.dataset.tables import DataError


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
        ({**PAIR, "rejected": "2"}, "chosen and rejected are the same"),
        ({**PAIR, "chosen": [{"role": "user", "content": "2"}]}, "chosen ends with"),
        ({**PAIR, "prompt": ""}, "prompt is empty"),
        ({"prompt": "1", "chosen": "2"}, "has no column 'rejected'"),
    ],
)
def test_a_bad_pair_is_named(tmp_path, caplog, bad, reason):
    assert len(dataset(tmp_path, [PAIR] * 150 + [bad])) == 150
    assert f"pairs.jsonl:151: {reason}" in caplog.text


CHAT = [{"role": "user", "content": "1+1"}]


def said(text):
    return {"role": "assistant", "content": text}


def test_sides_may_be_messages_or_conversations(tmp_path):
    expected = ["<|user|>1+1<|assistant|>2</s>", "<|user|>1+1<|assistant|>11</s>"]
    rows = [
        {"prompt": CHAT, "chosen": [said("2")], "rejected": [said("11")]},
        {"prompt": "1+1", "chosen": [*CHAT, said("2")], "rejected": [*CHAT, said("11")]},
    ]
    pairs = dataset(tmp_path, rows, max_length=12)
    assert [texts(pairs[0]), texts(pairs[1])] == [expected, expected]
    without = [{"chosen": [*CHAT, said("2")], "rejected": [*CHAT, said("11")]}]
    assert texts(dataset(tmp_path, without, max_length=12)[0]) == expected


def test_response_tokens_are_marked(tmp_path):
    row = dataset(tmp_path, [PAIR], max_length=10)[0]
    assert row["loss_mask"].tolist() == [
        [0, 0, 0, 0, 0, 1, 1, 0, 0, 0],
        [0] * 5 + [1] * 3 + [0] * 2,
    ]


def test_long_pairs_are_refused_counted_or_equal_after_the_cut(tmp_path, caplog):
    with pytest.raises(RowTooLong, match=r"pairs.jsonl:1 has 8 tokens, more than .*=7"):
        dataset(tmp_path, [PAIR], max_length=7, truncation="error").check_lengths()
    dataset(tmp_path, [PAIR], max_length=7).check_lengths()
    assert "1 of 1 pairs are longer than data.max_length=7 and lose their beginning" in caplog.text
    right = dataset(tmp_path, [PAIR], max_length=6, truncation="right")
    assert right[0]["loss_mask"].sum(1).tolist() == [1, 1]
    with pytest.raises(DataError, match="same tokens on both sides after truncation"):
        dataset(tmp_path, [PAIR], max_length=5, truncation="right").check_lengths()
