import json
import math

import pytest
import torch

from verl.trainer.ppo.validation import dump_generations


def dump(tmp_path, **changes):
    columns = {
        "inputs": ["2+2", "\u2028 3+3"],
        "outputs": ["4\n", "\x1b[31m7"],
        "gts": ["4", {"target": ["6"]}],
        "scores": [torch.tensor(1.0), math.nan],
        "reward_extra_infos": {"acc": [True, None], "score": [9.0, 9.0]},
    }
    return dump_generations(tmp_path / "rollouts", 7, **columns | changes)


def test_a_step_is_one_line_of_json_per_response(tmp_path):
    path = dump(tmp_path)
    assert path == tmp_path / "rollouts" / "7.jsonl"
    first, second = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    assert json.loads(first) == {
        "input": "2+2",
        "output": "4\n",
        "gts": "4",
        "score": 1.0,  # the score itself, not an extra of the same name
        "acc": True,
        "step": 7,
    }
    assert json.loads(second)["score"] == "NaN"
    assert json.loads(second)["output"] == "\x1b[31m7"
    assert "\x1b" not in second
    assert [entry.name for entry in path.parent.iterdir()] == ["7.jsonl"]


def test_any_text_can_be_written_and_none_steers_a_terminal(tmp_path):
    strange = "漢字 \x9b31m \u202e \u2028 \x7f \ud800 é"
    text = dump(tmp_path, outputs=[strange, ""]).read_text(encoding="utf-8")
    assert json.loads(text.split("\n")[0])["output"] == strange
    assert "漢字" in text
    assert not any(c in text for c in "\x9b\u202e\u2028\x7f")


def test_a_column_of_another_length_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match="acc has 1 entries for 2 responses"):
        dump(tmp_path, reward_extra_infos={"acc": [1.0]})
    assert list(tmp_path.iterdir()) == []
