import logging

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.protocol.trajectory import Abstain, InfraError, Score, Trajectory
from verl.trainer.ppo.reward import RewardError, WholeBatchReward
from verl.trainer.ppo.scoring import reported_metrics, score_batch
from verl.workers.reward_manager.adapters import groups_of
from verl.workers.reward_manager.grader import Grader
from verl.workers.reward_manager.service import GradingService

FAULT, UNSURE = InfraError("timed out"), Abstain("cannot tell")


class Grades(Grader):
    """Gives the grades it was made with, a list per call."""

    scope = "step"

    def __init__(self, *calls):
        self.calls = list(calls)
        self.graded = []

    async def grade(self, trajectory):
        raise NotImplementedError

    async def grade_many(self, trajectories):
        self.graded.append([trajectory.row["row"] for trajectory in trajectories])
        return self.calls.pop(0)


def batch(uids) -> DataProto:
    count = len(uids)
    return DataProto.from_dict(
        tensors={
            "responses": torch.ones(count, 2, dtype=torch.long),
            "attention_mask": torch.ones(count, 3, dtype=torch.long),
        },
        non_tensors={"uid": list(uids), "row": np.arange(count)},
    )


def scores(*values):
    return [Score(float(value), {"acc": value > 0}) for value in values]


def test_scores_stand_on_the_last_tokens_and_reports_become_columns():
    scored = score_batch(batch("aabb"), Grades(scores(1, 0, 0, 1)))
    assert scored.batch.batch["token_level_scores"].tolist() == [[0, 1], [0, 0], [0, 0], [0, 1]]
    assert scored.batch.non_tensor_batch["acc"].tolist() == [True, False, False, True]
    assert scored.batch.meta_info["reward_extra_keys"] == ["acc"]
    assert scored.dropped == {}
    assert scored.metrics["reward/num_errors"] == 0


@pytest.mark.parametrize("value", [1e39, float("nan")])
def test_a_score_that_came_with_the_response_and_is_not_finite_is_a_fault(value):
    data = batch("aabb")
    data.batch["rm_scores"] = torch.tensor([[0.0, 1.0], [0.0, value], [0.0, 0.0], [0.0, 1.0]])
    scored = score_batch(data, Grades())
    assert scored.batch.non_tensor_batch["uid"].tolist() == ["b", "b"]
    assert scored.metrics["reward/num_errors"] == 1
    assert "the score that came with the response is" in scored.dropped["a"]


def test_a_group_with_a_fault_is_graded_again_as_a_whole(caplog):
    grader = Grades([*scores(1, 0), *scores(1), FAULT], scores(0, 1))
    with caplog.at_level(logging.WARNING):
        scored = score_batch(batch("aabb"), grader)
    assert grader.graded == [[0, 1, 2, 3], [2, 3]]
    assert scored.batch.batch["token_level_scores"].sum(1).tolist() == [1, 0, 0, 1]
    assert scored.metrics["reward/num_errors"] == 1
    assert "timed out; trying again" in caplog.text


def test_a_group_that_fails_twice_is_dropped_whole_and_counted():
    grader = Grades([*scores(1, 0), *scores(1), FAULT], [*scores(1), FAULT])
    scored = score_batch(batch("aabb"), grader)
    assert scored.batch.non_tensor_batch["uid"].tolist() == ["a", "a"]
    assert scored.dropped == {"b": "timed out"}
    assert scored.metrics == {
        "reward/num_errors": 2.0,
        "reward/num_abstained": 0.0,
        "reward/num_groups_set_aside": 1.0,
    }


def test_an_abstention_removes_the_response_and_two_are_needed_to_compare():
    grades = [*scores(1, 0), UNSURE, *scores(1), UNSURE, *scores(1, 0, 1)]
    scored = score_batch(batch("aaabbccc"), Grades(grades))
    assert scored.batch.non_tensor_batch["row"].tolist() == [0, 1, 5, 6, 7]
    assert scored.dropped == {"b": "cannot tell"}


def test_a_lone_response_is_kept_when_scored_and_dropped_when_not():
    scored = score_batch(batch("ab"), Grades([*scores(1), UNSURE]))
    assert scored.batch.non_tensor_batch["row"].tolist() == [0]
    assert scored.dropped == {"b": "cannot tell"}


def test_rows_of_a_group_need_not_stand_together():
    grader = Grades([*scores(1, 1), FAULT, *scores(1)], [FAULT, *scores(1)])
    scored = score_batch(batch("abab"), grader)
    assert grader.graded == [[0, 2, 1, 3], [1, 3]]
    assert scored.batch.non_tensor_batch["row"].tolist() == [0, 2]
    assert scored.dropped == {"b": "timed out"}


def test_a_step_in_which_nothing_could_be_graded_stops_with_the_reason():
    with pytest.raises(RewardError, match="none of 2 responses could be scored: timed out"):
        score_batch(batch("aa"), Grades([FAULT, FAULT], [FAULT, FAULT]))


def test_a_wrong_number_of_grades_stops_before_an_update():
    with pytest.raises(RewardError, match="3 grades for 2 responses"):
        score_batch(batch("aa"), Grades(scores(1, 1, 1), scores(1, 1, 1)))


def test_a_function_of_the_whole_batch_is_used_as_it_is():
    reward = WholeBatchReward(lambda data: torch.arange(len(data)))
    scored = score_batch(batch("aab"), reward)
    assert scored.batch.batch["token_level_scores"].sum(1).tolist() == [0, 1, 2]


def test_scores_of_agent_loops_are_used_as_they_are():
    data = batch("aa")
    data.batch["rm_scores"] = torch.tensor([[0.0, 2.0], [0.0, 3.0]])

    grader = Grades()
    assert score_batch(data, grader).batch.batch["token_level_scores"].sum(1).tolist() == [2, 3]
    assert grader.graded == []


def graded_groups(uids, grades):
    return groups_of(
        [
            Trajectory(uid=uid, sample=0, row={"row": row}, grade=grade)
            for row, (uid, grade) in enumerate(zip(uids, grades, strict=True))
        ]
    )


def test_of_groups_that_are_graded_only_those_with_an_infra_error_are_graded_again():
    groups = graded_groups("aabb", [*scores(1, 0, 1), FAULT])
    grader = Grades(scores(0, 1))
    scored = score_batch(batch("aabb"), Grades(), groups, GradingService(grader))
    assert grader.graded == [[2, 3]]
    assert scored.batch.batch["token_level_scores"].sum(1).tolist() == [1, 0, 0, 1]
    assert scored.metrics["reward/num_errors"] == 1


@pytest.mark.parametrize("case", ["rows were dropped", "rows were moved", "one has no grade"])
def test_a_batch_that_is_not_that_of_its_graded_groups_is_graded_itself(case):
    grades = [*scores(1, 1, 1), None if case == "one has no grade" else Score(1.0)]
    groups = graded_groups("aabb", grades)
    uids = {"rows were dropped": "aab", "rows were moved": "bbaa"}.get(case, "aabb")
    grader = Grades(scores(*range(len(uids))))
    scored = score_batch(batch(uids), grader, groups, GradingService(Grades()))
    assert scored.batch.batch["token_level_scores"].sum(1).tolist() == list(range(len(uids)))


def test_what_was_tried_again_already_is_dropped_without_another_try():
    died = InfraError("4 processes died", is_final=True)
    grader = Grades([*scores(1, 0), *scores(1), died])
    scored = score_batch(batch("aabb"), grader)
    assert grader.graded == [[0, 1, 2, 3]]
    assert scored.dropped == {"b": "4 processes died"}
    assert scored.metrics["reward/num_errors"] == 1.0


def test_the_mean_of_every_reported_number_is_a_metric():
    grades = [
        Score(1.0, {"acc": True, "steps": 3, "text": "x", "some": np.float32(0.5)}),
        Score(0.0, {"acc": False, "steps": 4, "text": "y"}),
    ]
    scored = score_batch(batch("aa"), Grades(grades))
    assert reported_metrics(scored.batch) == {
        "reward/acc/mean": 0.5, "reward/steps/mean": 3.5, "reward/some/mean": 0.5,
    }  # fmt: skip


def test_rewards_of_a_manager_keep_their_tokens_and_one_call_sees_the_whole_batch():
    calls = []

    def manager(data, return_dict):
        calls.append(data)
        data.batch["seen"] = torch.ones(len(data))
        rewards = torch.tensor([[0.5, 1.0], [0.0, 2.0], [1.0, 0.0]])
        return {"reward_tensor": rewards, "reward_extra_info": {"acc": [1, None, 0]}}

    data = batch("aab")
    scored = score_batch(data, manager)
    assert calls == [data], "the batch itself, so that a manager can add columns to it"
    expected = [[0.5, 1.0], [0.0, 2.0], [1.0, 0.0]]
    assert scored.batch.batch["token_level_scores"].tolist() == expected
    assert scored.batch.non_tensor_batch["acc"].tolist() == [1, None, 0]
    assert "seen" in scored.batch.batch.keys()  # noqa: SIM118


def test_a_manager_that_raises_is_called_once_and_stops_the_step():
    calls = []

    def manager(data):
        calls.append(len(data))
        raise KeyError("no such answer")

    with pytest.raises(RewardError, match=r"none of 2 .*manager failed on a batch of 2 .*KeyError"):
        score_batch(batch("aa"), manager)
    assert calls == [2]
