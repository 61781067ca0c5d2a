import json
import logging
import math

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import groups_without_spread
from verl.trainer.ppo.tripwires import (
    RULES,
    NonFiniteValues,
    TooManyBadSteps,
    Tripwires,
    keep_for_replay,
    require_finite,
)

BROKEN = {
    "ratio_not_one": {"actor/old_log_prob_error": 0.5},
    "rollout_mismatch": {"training/rollout_probs_diff_mean": 0.2},
    "reference_differs_at_start": {"actor/ref_distance": 0.3},
    "equal_rewards": {"reward/ratio_groups_without_spread": 1.0},
    "reward_errors": {"reward/num_errors": 1.0},
    "grader_abstains": {"abstained_ratio": 0.5},
    "identical_responses": {"identical_ratio": 0.95},
    "reward_jump": {"score_sigmas": 6.0},
    "graders_disagree": {"disagreement": 0.02},
    "truncated_responses": {"rollout/truncated_ratio": 0.9},
    "skipped_updates": {"actor/num_skipped_steps": 1},
    "entropy_collapse": {"actor/entropy": 0.001},
}


def test_there_is_a_case_for_every_rule():
    assert set(BROKEN) == {rule.name for rule in RULES}


def first_step(name):
    """Entropy collapses compared with the first step; everything else may break at once."""
    wires = Tripwires()
    if name == "entropy_collapse":
        assert wires.check({"actor/entropy": 2.0}, 1) == {}
    return wires


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_told_once_and_counted(name, caplog):
    wires = first_step(name)
    with caplog.at_level(logging.WARNING):
        assert wires.check(BROKEN[name], 2) == {f"tripwire/{name}": 1.0}
    assert caplog.text.count(f"{name}: step 2: ") == 1
    caplog.clear()
    metrics = dict(BROKEN[name])
    again = 1.0 if name == "reference_differs_at_start" else 2.0  # only the start counts
    assert wires.check(metrics, 3) == {f"tripwire/{name}": again}
    assert not caplog.records


def test_a_message_belongs_to_the_steps_in_which_its_rule_was_broken():
    wires = Tripwires()
    wires.check(BROKEN["equal_rewards"], 1)
    assert "same reward" in wires.take_messages()["equal_rewards"]
    assert wires.check({}, 2) == {"tripwire/equal_rewards": 1.0}
    assert wires.take_messages() == {}


def test_a_healthy_step_breaks_no_rule():
    healthy = {
        "actor/old_log_prob_error": 1e-6,
        "training/rollout_probs_diff_mean": 1e-4,
        "actor/ref_distance": 1e-7,
        "reward/ratio_groups_without_spread": 0.9,
        "reward/num_errors": 0.0,
        "rollout/truncated_ratio": 0.2,
        "actor/num_skipped_steps": 0,
        "actor/entropy": 1.0,
    }
    assert Tripwires().check(healthy, 1) == {}


def test_a_policy_that_was_certain_from_the_start_has_not_collapsed():
    wires = Tripwires()
    wires.check({"actor/entropy": 0.005}, 1)
    assert wires.check({"actor/entropy": 0.004}, 2) == {}


def test_three_bad_steps_in_a_row_end_the_run():
    wires = Tripwires()
    for step in (1, 2):
        wires.bad_step(ValueError("nan"), step)
    wires.good_step()
    for step in (4, 5):
        wires.bad_step(ValueError("nan"), step)
    with pytest.raises(TooManyBadSteps, match="3 steps in a row were left out") as stop:
        wires.bad_step(ValueError("nan"), 6)
    assert stop.value.exit_code == 70
    assert wires.counts["non_finite"] == 5


def test_counts_survive_a_restart():
    wires = first_step("entropy_collapse")
    wires.bad_step(ValueError("nan"), 2)
    resumed = Tripwires()
    resumed.load_state_dict(wires.state_dict())
    assert resumed.check({"actor/entropy": 0.001}, 3) == {
        "tripwire/entropy_collapse": 1.0,
        "tripwire/non_finite": 1.0,
    }
    assert resumed.bad_steps_in_a_row == 1


def batch(**columns) -> DataProto:
    return DataProto.from_dict(
        tensors={"response_mask": torch.tensor([[1, 1, 0]]), **columns},
        non_tensors={"uid": ["a"], "data_source": ["x"], "odd": [object()]},
        meta_info={"temperature": 1.0},
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_named_by_their_column(value):
    data = batch(old_log_probs=torch.tensor([[0.0, value, 0.0]]), values=torch.zeros(1, 3))
    with pytest.raises(NonFiniteValues, match=r"^old_log_probs of the batch") as fault:
        require_finite(data, "old_log_probs", "values", "absent")
    assert fault.value.columns == ["old_log_probs"]


def test_what_is_not_trained_may_hold_anything():
    require_finite(batch(values=torch.tensor([[0.0, 0.0, math.nan]])), "values")


def test_a_batch_that_was_left_out_can_be_read_again(tmp_path):
    values = torch.tensor([[0.0, math.nan, 0.0]])
    path = keep_for_replay(batch(values=values), tmp_path / "bad", step=4)
    replayed = DataProto.load_from_disk(path)
    with pytest.raises(NonFiniteValues, match="values"):
        require_finite(replayed, "values")
    assert replayed.meta_info == {"temperature": 1.0}


def scored(uids, values) -> DataProto:
    return DataProto.from_dict(
        tensors={"token_level_scores": torch.tensor([[v] for v in values], dtype=torch.float32)},
        non_tensors={"uid": np.array(list(uids), dtype=object)},
    )


def test_prompts_that_teach_nothing_are_counted():
    assert groups_without_spread(scored("aabbcc", [1, 1, 0, 1, 0, 0])) == pytest.approx(2 / 3)
    assert groups_without_spread(scored("ab", [1, 1])) == 1.0
    assert groups_without_spread(scored("ab", [1, 0])) == 0.0


def step_batch(scores, texts=None):
    texts = range(len(scores)) if texts is None else texts
    responses = torch.tensor([[text, 7] for text in texts])
    mask = torch.tensor([[1, 0]]).expand(len(scores), 2)  # the second token is padding
    levels = torch.zeros(len(scores), 2)
    levels[:, 0] = torch.tensor(scores)
    tensors = {"responses": responses, "response_mask": mask, "token_level_scores": levels}
    return DataProto.from_dict(tensors=tensors)


def test_a_mean_score_far_from_that_of_recent_steps_is_a_jump_also_after_a_resume():
    wires = Tripwires()
    for step in range(1, 11):
        assert wires.check({}, step, step_batch([0.0, 1.0] * 8 + [float(step % 2)] * 2)) == {}
    resumed = Tripwires()
    resumed.load_state_dict(json.loads(json.dumps(wires.state_dict())))
    for one in (wires, resumed):
        assert one.check({}, 11, step_batch([5.0, 6.0] * 9)) == {"tripwire/reward_jump": 1.0}


def test_the_first_success_after_nothing_but_failures_is_no_jump():
    wires = Tripwires()
    for step in range(1, 20):
        assert wires.check({}, step, step_batch([0.0] * 16)) == {}
    assert wires.check({}, 20, step_batch([0.0] * 15 + [1.0])) == {}


def test_equal_responses_and_abstentions_are_seen_in_the_batch():
    wires = Tripwires()
    assert wires.check({}, 1, step_batch([0.0, 1.0] * 5, texts=[3] * 9 + [4])) == {}
    found = wires.check({}, 2, step_batch([0.0, 1.0] * 5, texts=[3] * 10))
    assert found == {"tripwire/identical_responses": 1.0}
    found = wires.check({"reward/num_abstained": 4.0}, 3, step_batch([0.0, 1.0] * 5))
    assert found["tripwire/grader_abstains"] == 1.0


def test_graders_disagree_when_enough_was_audited():
    wires = Tripwires()
    audited = {"reward/num_audited": 30.0, "reward/num_audit_disagreements": 1.0}
    assert wires.check(audited, 1) == wires.check(audited, 2) == wires.check(audited, 3) == {}
    assert wires.check(audited, 4) == {"tripwire/graders_disagree": 1.0}
    rare = Tripwires()
    rare.check({"reward/num_audited": 1000.0, "reward/num_audit_disagreements": 4.0}, 1)
    assert not rare.counts
