"""What passes and ranks report becomes what one pass over everything would have reported."""

import math

import pytest
import torch
from tensordict import TensorDict

from verl.utils.metric import Metric
from verl.workers.engine.base import TrainResult
from verl.workers.engine.inputs import prompt_groups
from verl.workers.mini_batch import (
    NUM_TOKENS,
    global_counts,
    merge_reports,
    summarise,
)
from verl.workers.schedule import StepPlan


def test_losses_are_summed_and_everything_else_is_averaged_over_tokens():
    reports = [
        {NUM_TOKENS: torch.tensor(3), "actor/pg_loss": 0.25, "actor/entropy": torch.tensor(2.0)},
        {NUM_TOKENS: torch.tensor(1), "actor/pg_loss": 0.5, "actor/entropy": torch.tensor(4.0)},
    ]
    merged = merge_reports(reports)
    assert merged["actor/pg_loss"].aggregate() == 0.75
    assert merged["actor/entropy"].aggregate() == 2.5  # (3 * 2 + 1 * 4) / 4
    assert set(merged) == {"actor/pg_loss", "actor/entropy"}


def test_a_pass_without_tokens_has_no_say_in_means_even_if_they_are_not_numbers():
    reports = [
        {NUM_TOKENS: 0, "actor/pg_loss": 0.0, "actor/entropy": math.nan},
        {NUM_TOKENS: 2, "actor/pg_loss": 1.0, "actor/entropy": 3.0},
    ]
    assert merge_reports(reports)["actor/entropy"].aggregate() == 3.0
    nothing = merge_reports(reports[:1])
    assert math.isnan(nothing["actor/entropy"].aggregate())
    assert nothing["actor/pg_loss"].aggregate() == 0.0


def test_declared_extremes_are_those_of_all_passes_and_steps():
    high, low = "rollout_corr/rollout_is_max", "rollout_corr/log_ppl_diff_min"
    reports = [
        {NUM_TOKENS: 1, high: 9.0, low: -3.0},
        {NUM_TOKENS: 9, high: 2.0, low: torch.tensor(1.0)},
        {NUM_TOKENS: 0, high: 99.0, low: math.nan},
    ]
    merged = merge_reports(reports)
    assert (merged[high].aggregate(), merged[low].aggregate()) == (9.0, -3.0)
    later = merge_reports([{NUM_TOKENS: 5, high: 4.0, low: -4.0}])
    metrics = summarise([(result(), merged), (result(), later)], "actor")
    assert (metrics[high], metrics[low]) == (9.0, -4.0)
    assert math.isnan(merge_reports(reports[2:])[high].aggregate())
    broken = merge_reports([{NUM_TOKENS: 1, high: value} for value in (math.nan, 1.0)])
    assert math.isnan(broken[high].aggregate())


def test_a_loss_that_is_not_finite_stays_so():
    reports = [{NUM_TOKENS: 1, "actor/pg_loss": value} for value in (math.inf, -math.inf)]
    assert math.isnan(merge_reports(reports)["actor/pg_loss"].aggregate())


def result(**changes):
    values = {"loss": 0.0, "grad_norm": 1.0, "learning_rate": 0.1, "is_applied": True}
    return TrainResult(**{**values, "num_micro_batches": 1, **changes})


def test_an_update_reports_means_over_steps_of_losses_and_over_tokens_of_the_rest():
    def report(loss, entropy, tokens):
        merged = {"actor/pg_loss": Metric("mean", loss), "actor/entropy": Metric("mean")}
        merged["actor/entropy"].append(entropy, tokens)
        return merged

    metrics = summarise(
        [
            (result(grad_norm=1.0), report(0.5, 2.0, 30)),
            (result(grad_norm=3.0, is_applied=False), report(1.5, 6.0, 10)),
        ],
        "actor",
    )
    assert metrics["actor/pg_loss"] == 1.0
    assert metrics["actor/entropy"] == 3.0
    assert metrics["actor/grad_norm"] == 2.0
    assert metrics["actor/num_optimizer_steps"] == 1
    assert metrics["actor/num_skipped_steps"] == 1


def test_counts_are_those_of_the_step_and_the_constant_is_the_width_unless_given():
    step = StepPlan(batch_num_tokens=12, global_batch_size=3, passes=[[[0, 1, 2]]])
    counts = global_counts(step, num_columns=8)
    assert counts == {
        "dp_size": 1,
        "batch_num_tokens": 12,
        "global_batch_size": 3,
        "loss_scale_factor": 8,
    }
    assert global_counts(step, 8, loss_scale_factor=100.0)["loss_scale_factor"] == 100.0


def test_rows_with_the_same_prompt_have_the_same_label():
    ids = torch.tensor([[0, 5, 6, 1], [7, 5, 6, 2], [0, 5, 6, 3], [9, 5, 6, 1]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0], [0, 1, 1, 1]])
    rows = TensorDict(
        {"input_ids": ids, "attention_mask": mask, "responses": ids[:, 3:]}, batch_size=4
    )
    labels = prompt_groups(rows)
    assert labels[0] == labels[2] == labels[3] != labels[1]  # what is masked does not count


@pytest.mark.parametrize("value", [1.0, torch.tensor(1.0), torch.tensor(1)])
def test_reports_may_be_numbers_or_tensors(value):
    merged = merge_reports([{NUM_TOKENS: value, "actor/x": value}])
    assert merged["actor/x"].aggregate() == 1.0
