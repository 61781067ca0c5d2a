import json

import numpy as np
import pytest
import torch

from tests.toy import ROLLOUT, toy_run, weights
from verl.protocol import DataProto
from verl.protocol.trajectory import Abstain, Group, InfraError, Score, Trajectory
from verl.trainer.ppo.own_loop import sample_table
from verl.trainer.ppo.validation import results_of, texts_of, validate
from verl.workers.reward_manager.grader import Grader

SAMPLING = [
    f"{ROLLOUT}.val_kwargs.{setting}" for setting in ("do_sample=true", "temperature=1.0", "n=4")
]
HALF = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    good = sum(map(ord, solution_str)) % 2 == 0
    return {"score": 1.0 if good else -1.0, "acc": good, "pred": "even" if good else "odd"}
"""


class Words:
    """Spells token ids as numbers."""

    def batch_decode(self, rows, skip_special_tokens=True):
        return [" ".join(map(str, row)) for row in rows]


class Grades(Grader):
    def __init__(self, grades):
        self.grades = grades

    async def grade(self, trajectory):
        return self.grades[trajectory.row["row"]]


def batch(uids) -> DataProto:
    count = len(uids)
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[0, 5]] * count),
            "responses": torch.tensor([[6, 7, 0]] * count),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 0]] * count),
        },
        non_tensors={
            "uid": list(uids),
            "row": np.arange(count),
            "data_source": ["sums"] * count,
            "reward_model": [{"ground_truth": "7"}] * count,
            "__num_turns__": np.full(count, 2),
        },
    )


def test_texts_have_neither_padding_nor_prompt():
    assert texts_of(batch("a"), Words()) == (["5"], ["6 7"])


def test_a_response_without_a_verdict_is_missing_and_not_wrong():
    grades = [Score(1.0, {"acc": 1.0}), Abstain("?"), Score(0.0, {"acc": 0.0}), InfraError("gone")]
    assert results_of(batch("aabb"), Grades(grades)) == [
        (1.0, {"acc": 1.0}),
        (None, {}),
        (0.0, {"acc": 0.0}),
        (None, {}),
    ]
    metrics = validate([(batch("aabb"), [])], Grades(grades), Words()).metrics()
    assert metrics["val-core/sums/acc/mean@2"] == 0.5
    assert metrics["val-aux/sums/reward/num_missing"] == 2.0


def test_samples_that_broken_tools_ended_count_as_missing_and_not_as_turns():
    row = {"data_source": "sums", "reward_model": {"ground_truth": "7"}}
    lost = Trajectory(uid="a", sample=2, row=row, grade=InfraError("gone"))
    groups = [Group(index=0, uid="a", drawn_at=-1, lost=[lost])]
    metrics = validate([(batch("aa"), groups)], Grades([Score(1.0)] * 2), Words()).metrics()
    assert metrics["val-aux/env_faults"] == metrics["val-aux/sums/reward/num_missing"] == 1.0
    assert metrics["val-aux/num_turns/min"] == metrics["val-aux/num_turns/mean"] == 2.0


def test_several_batches_are_one_validation():
    grades = [Score(1.0), Score(0.0)]
    samples = validate([(batch("aa"), []), (batch("bb"), [])], Grades(grades), Words())
    assert samples.uids == ["a", "a", "b", "b"]
    assert samples.metrics()["val-core/sums/reward/mean@2"] == 0.5


def test_the_table_of_samples_is_the_same_each_time():
    inputs = list("dbca")
    table = sample_table(inputs, inputs, range(4))
    assert table == sample_table(inputs[::-1], inputs[::-1], range(4)[::-1])
    assert table != sorted(table)
    assert sorted(row[0] for row in table) == list("abcd")


# ---- in a run ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def only(toy, tmp_path_factory):
    """A validation with four samples per prompt, and no training."""
    folder = tmp_path_factory.mktemp("only")
    (folder / "half.py").write_text(HALF)
    changes = [
        *SAMPLING,
        "trainer.val_only=true",
        f"custom_reward_function.path={folder / 'half.py'}",
        f"trainer.validation_data_dir={folder / 'dumps'}",
    ]
    before = toy_run(toy, folder, *changes)
    again = toy_run(toy, folder, *changes)
    return folder, before, again


def test_validation_alone_reports_at_step_zero_and_trains_nothing(only, toy):
    _, (metrics, trainer), _ = only
    assert [step["step"] for step in metrics] == [0]
    assert trainer.global_steps == 0


def test_the_headline_is_accuracy_at_all_samples(only):
    _, (metrics, _), _ = only
    core = {name for name in metrics[0] if name.startswith("val-core/")}
    assert core == {
        f"val-core/sevens/acc/{metric}"
        for metric in ("mean@4", "best@4/mean", "best@4/std", "maj@4/mean", "maj@4/std")
    }
    assert 0 < metrics[0]["val-core/sevens/acc/mean@4"] < 1
    assert {"val-aux/sevens/reward/worst@2/mean", "val-aux/num_turns/mean"} <= set(metrics[0])


def test_all_samples_are_written_with_what_was_reported(only):
    folder, (metrics, _), _ = only
    rows = [json.loads(line) for line in (folder / "dumps" / "0.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    assert {"input", "output", "gts", "score", "acc", "pred", "step"} <= rows[0].keys()
    mean = sum(row["acc"] for row in rows) / 12
    assert mean == pytest.approx(metrics[0]["val-core/sevens/acc/mean@4"])
    assert len({row["output"] for row in rows if row["input"] == rows[0]["input"]}) == 4


def test_the_same_policy_is_validated_with_the_same_samples(only):
    _, (first, _), (second, _) = only
    keep = [name for name in first[0] if name.startswith("val-")]
    assert [first[0][name] for name in keep] == [second[0][name] for name in keep]


def test_greedy_validation_gives_one_answer_however_often_it_is_asked(toy, tmp_path):
    changes = [
        f"{ROLLOUT}.val_kwargs.n=3",
        "trainer.val_only=true",
        f"trainer.validation_data_dir={tmp_path}",
    ]
    toy_run(toy, tmp_path, *changes)
    rows = [json.loads(line) for line in (tmp_path / "0.jsonl").read_text().splitlines()]
    answers = {}
    for row in rows:
        answers.setdefault(row["input"], set()).add(row["output"])
    assert [len(distinct) for distinct in answers.values()] == [1, 1, 1]


def test_validation_comes_before_training_at_intervals_and_at_the_end(toy, tmp_path):
    changes = [
        "trainer.val_before_train=true",
        "trainer.test_freq=2",
        "trainer.total_training_steps=3",
    ]
    metrics, _ = toy_run(toy, tmp_path, *changes)
    with_validation = [step["step"] for step in metrics if "val-core/sevens/acc/mean@1" in step]
    assert with_validation == [0, 2, 3]
    assert [step["step"] for step in metrics] == [0, 1, 2, 3]


def test_without_an_interval_there_is_no_validation_behind_the_first_step(toy, tmp_path):
    metrics, _ = toy_run(toy, tmp_path, "trainer.val_before_train=true")
    with_validation = [step["step"] for step in metrics if "val-core/sevens/acc/mean@1" in step]
    assert with_validation == [0]


def test_validation_changes_nothing_in_training(toy, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    _, with_it = toy_run(toy, tmp_path / "a", "trainer.test_freq=1", *SAMPLING)
    _, without = toy_run(toy, tmp_path / "b", "data.val_files=[]")
    pairs = zip(weights(with_it).values(), weights(without).values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert without.val_dataloader is None
