"""Ages of tokens, what is reported of them, and rejection of those that are too old."""

import math

import numpy as np
import pytest
import torch

from verl.algos.rollout_correction import off_policy_metrics, reject_stale, token_ages
from verl.protocol import DataProto
from verl.protocol.padded import Padding, padded_batch, trajectories_of
from verl.protocol.trajectory import Segment, Trajectory
from verl.utils.metric.declared import declared_metric

PREFIX = "training/off_policy"


def batch_of(versions, mask=None, *, uids=None, sessions=None, **columns) -> DataProto:
    versions = torch.tensor(versions)
    tensors = {
        "policy_versions": versions,
        "response_mask": (versions >= 0).long() if mask is None else torch.tensor(mask),
        **{name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()},
    }
    arrays = {"uid": np.array(uids or ["p"] * len(versions), dtype=object)}
    if sessions is not None:
        arrays["session_uid"] = np.array(sessions, dtype=object)
    return DataProto.from_dict(tensors=tensors, non_tensors=arrays)


def test_ages_are_counted_per_token_and_in_training_steps():
    batch = batch_of([[4, 4, 6], [7, -1, 9]])
    assert token_ages(batch, 9).tolist() == [[5, 5, 3], [2, -1, 0]]
    # Steps of three optimizer steps: 0, 3, 6, 9. Version 7 is inside the third of them.
    assert token_ages(batch, 9, [0, 3, 6, 9]).tolist() == [[2, 2, 1], [1, -1, 0]]


@pytest.mark.parametrize("versions", [[[3, 10]], [[3, -1]]])
def test_a_trained_token_of_no_known_policy_is_refused(versions):
    with pytest.raises(ValueError, match="trained token 1 of row 0 has policy version"):
        token_ages(batch_of(versions, [[1, 1]]), 9)


def test_staleness_of_trajectories_by_hand():
    # Row 0 and 1 are one session of ages 3, 3, 1 and 0; row 2 has ages 1, 1; row 3 is not trained.
    batch = batch_of(
        [[6, 6, 8], [9, -1, -1], [8, 8, -1], [2, 2, 2]],
        [[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]],
        uids=["a", "a", "b", "b"],
        sessions=["a0", "a0", "b0", "b1"],
    )
    metrics = off_policy_metrics(batch, 9)
    found = {name: value for name, value in metrics.items() if "trajectory" in name}
    staleness = {"mean": (7 / 4 + 1) / 2, "max": 7 / 4, "min": 1.0}
    expected = {
        f"{PREFIX}/trajectory_spans/mean": 1.5,
        f"{PREFIX}/trajectory_spans/max": 3,
        f"{PREFIX}/trajectory_spans/min": 0,
        **{f"{PREFIX}/trajectory_staleness/{k}": v for k, v in staleness.items()},
        f"{PREFIX}/trajectory_staleness_worst/mean": 2,
        f"{PREFIX}/trajectory_staleness_worst/max": 3,
        f"{PREFIX}/trajectory_staleness_worst/min": 1,
        "fully_async/count/stale_trajectory_processed": 2,
    }
    assert found == pytest.approx(expected)
    assert metrics["fully_async/count/stale_samples_processed"] == 2
    assert metrics["fully_async/partial/total_partial_num"] == 1
    assert metrics["fully_async/partial/partial_ratio"] == 0.5
    assert metrics["fully_async/partial/max_partial_span"] == 3
    shares = [metrics[f"{PREFIX}/age_{age}/token_ratio"] for age in range(4)]
    assert shares == pytest.approx([1 / 6, 3 / 6, 0, 2 / 6])
    assert not [name for name in metrics if declared_metric(name) is None]


def test_divergence_from_the_sampling_policy_is_reported_by_age():
    # Ages 0 and 1; r = pi_prox / pi_behave is 1 at age 0 and 2, 1/2 at age 1; a masked 100.
    log_r = [[0.0, math.log(2.0), math.log(0.5), math.log(100.0)]]
    batch = batch_of(
        [[5, 4, 4, 4]], [[1, 1, 1, 0]], old_log_probs=log_r, rollout_log_probs=[[0] * 4]
    )
    metrics = off_policy_metrics(batch, 5, is_proximal=True, clip_range=(0.2, 0.3))
    assert metrics[f"{PREFIX}/age_0/kl"] == 0
    assert metrics[f"{PREFIX}/age_0/ess"] == 1
    assert metrics[f"{PREFIX}/age_1/kl"] == pytest.approx(0.25)  # (2 - 1 + 0.5 - 1) / 2
    assert metrics[f"{PREFIX}/age_1/ess"] == pytest.approx(1.25**2 / 2.125)
    assert metrics[f"{PREFIX}/ess"] == pytest.approx((3.5 / 3) ** 2 / (5.25 / 3))
    assert metrics[f"{PREFIX}/clipfrac"] == pytest.approx(2 / 3)
    assert not [name for name in metrics if declared_metric(name) is None]


def test_nothing_is_reported_of_a_batch_without_a_trained_token():
    assert off_policy_metrics(batch_of([[3, 3]], [[0, 0]]), 9) == {}


def test_sessions_with_a_token_that_is_too_old_are_masked_and_counted():
    versions = [[9, 9, 5], [9, -1, -1], [8, 8, -1], [7, -1, -1]]
    batch = batch_of(versions, sessions=["a", "a", "b", "c"])
    mask = batch.batch["response_mask"].clone()
    same, metrics = reject_stale(batch, 9, max_age=None)
    assert torch.equal(same.batch["response_mask"], mask)
    assert metrics[f"{PREFIX}/evicted_samples"] == 0
    kept, metrics = reject_stale(batch, 9, max_age=3)
    assert kept.batch["response_mask"].tolist() == [[0] * 3, [0] * 3, [1, 1, 0], [1, 0, 0]]
    assert metrics[f"{PREFIX}/evicted_samples"] == 1
    # The bias towards short answers is visible: 4 tokens against a mean of 7 / 3.
    assert metrics[f"{PREFIX}/evicted_length_ratio"] == pytest.approx(12 / 7)
    assert not [name for name in metrics if declared_metric(name) is None]


def turn(token_ids, versions, parent, author="model") -> Segment:
    is_model = author == "model"
    log_probs = [-0.5] * len(token_ids) if is_model else None
    return Segment(
        author=author,
        token_ids=token_ids,
        is_trained=is_model,
        log_probs=log_probs,
        versions=versions,
        parent=parent,
    )


def test_versions_of_turns_become_a_column_that_is_cut_like_the_response():
    segments = [
        turn([1, 2], None, -1, "template"),
        turn([3, 4], [7, 8], 0),
        turn([5], None, 1, "tool"),
        turn([6, 7, 8], [8, 9, 9], 2),
    ]
    rows = [Trajectory(uid="a", sample=0, row={}, segments=segments)]
    padding = Padding(prompt_length=2, response_length=5, pad_token_id=0)
    assert "policy_versions" not in padded_batch(rows, padding).batch.keys()  # noqa: SIM118
    batch = padded_batch(rows, padding, with_versions=True)
    assert batch.batch["policy_versions"].tolist() == [[7, 8, -1, 8, 9]]
    back = padded_batch(trajectories_of(batch), padding, with_versions=True)
    assert torch.equal(back.batch["policy_versions"], batch.batch["policy_versions"])
    segments[1].versions = None
    with pytest.raises(ValueError, match=r"tokens 0 to 2 of a/0 .* which policy version"):
        padded_batch(rows, padding, with_versions=True)
