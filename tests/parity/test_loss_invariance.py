"""A mini-batch has one gradient, however it is cut into micro-batches and spread over ranks."""

import random

import pytest
import torch
from torch import Tensor

from tests.algos.loss_cases import CASES, Batch, actor, loss_of, prepared, random_batch
from verl.algos.aggregate import LOSS_AGG_MODES
from verl.utils.metric import Metric

Partition = list[list[list[int]]]
"""Ranks, their micro-batches, the rows of each."""

NUM_ROWS = 9
MASKED_ROW = 1  # has no token at all

ODD_PARTITIONS: list[Partition] = [
    [[[row] for row in range(NUM_ROWS)]],  # one row at a time
    [[[MASKED_ROW], [0], [2, 3, 4, 5, 6, 7, 8]]],  # a micro-batch without a token
    [[[], [0, 1, 2, 3, 4, 5, 6, 7, 8], []]],  # micro-batches without a row
    [[[MASKED_ROW]], [[0, 2, 3, 4, 5, 6, 7, 8]]],  # a rank without a token
    [[[]], [[0, 1], [2, 3, 4]], [[]], [[5], [6, 7, 8]]],  # ranks without a row
]


def random_partition(seed: int) -> Partition:
    """1, 2 or 4 ranks; every row goes to a random micro-batch, so some may stay empty."""
    chooser = random.Random(seed)
    ranks = chooser.choice([1, 2, 4])
    partition: Partition = [[[] for _ in range(chooser.randint(1, 4))] for _ in range(ranks)]
    rows = list(range(NUM_ROWS))
    chooser.shuffle(rows)
    for row in rows:
        chooser.choice(chooser.choice(partition)).append(row)
    return partition


PARTITIONS = [*ODD_PARTITIONS, *(random_partition(seed) for seed in range(8))]


def counts(batch: Batch, dp_size: int) -> dict[str, int | Tensor]:
    """What a trainer counts before the first micro-batch."""
    return {
        "dp_size": dp_size,
        "batch_num_tokens": batch.response_mask.sum(),
        "global_batch_size": batch.response_mask.any(-1).sum(),
        "loss_scale_factor": 7,
    }


def train(
    batch: Batch,
    partition: Partition,
    case: str,
    mode: str,
    *,
    prepare: bool = True,
    weights: Tensor | None = None,
) -> tuple[Tensor, float, dict[str, float]]:
    """Gradient, loss and metrics after all micro-batches of all ranks, as FSDP averages them."""
    batch = batch.with_gradient()
    dp_size = len(partition)
    config = actor(case, global_batch_info=counts(batch, dp_size))
    columns = prepared(batch, config) if prepare else {}
    total, metrics = 0.0, {}
    for rank in partition:
        for rows in rank:
            part = batch.rows(rows)
            extra = {name: column[rows] for name, column in columns.items()}
            part_weights = None if weights is None else weights[rows]
            loss, found = loss_of(part, config, mode, part_weights, **extra)
            (loss / dp_size).backward()
            total += loss.item() / dp_size
            for name, value in found.items():
                if name.startswith("actor/"):
                    metric = metrics.setdefault(name, Metric("mean"))
                    metric.append(value, weight=part.response_mask.sum().item())
    assert batch.log_prob.grad is not None
    return batch.log_prob.grad, total, {name: m.aggregate() for name, m in metrics.items()}


def whole(batch: Batch) -> Partition:
    return [[list(range(len(batch.log_prob)))]]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("case", CASES)
def test_gradient_loss_and_metrics_do_not_depend_on_the_partition(case: str, mode: str):
    batch = random_batch(NUM_ROWS)
    gradient, loss, metrics = train(batch, whole(batch), case, mode)
    assert gradient.abs().sum() > 0
    for partition in PARTITIONS:
        parts_gradient, parts_loss, parts_metrics = train(batch, partition, case, mode)
        torch.testing.assert_close(parts_gradient, gradient, rtol=0, atol=1e-10)
        assert parts_loss == pytest.approx(loss, rel=0, abs=1e-10)
        # clip fractions are computed in single precision
        assert parts_metrics == pytest.approx(metrics, rel=0, abs=1e-6)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("bypass")])
def test_importance_weights_do_not_make_it_depend_on_the_partition(case: str, mode: str):
    batch = random_batch(NUM_ROWS)
    weights = random_batch(NUM_ROWS, seed=5).advantages.abs()
    gradient, loss, _ = train(batch, whole(batch), case, mode, weights=weights)
    plain, _, _ = train(batch, whole(batch), case, mode)
    assert not torch.allclose(gradient, plain)
    for partition in PARTITIONS:
        parts_gradient, parts_loss, _ = train(batch, partition, case, mode, weights=weights)
        torch.testing.assert_close(parts_gradient, gradient, rtol=0, atol=1e-10)
        assert parts_loss == pytest.approx(loss, rel=0, abs=1e-10)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("case", CASES)
def test_counts_of_the_whole_batch_are_what_a_direct_call_assumes(case: str, mode: str):
    batch = random_batch(NUM_ROWS).with_gradient()
    config = actor(case, loss_scale_factor=7)
    loss, _ = loss_of(batch, config, mode, **prepared(batch, config))
    gradient = torch.autograd.grad(loss, batch.log_prob)[0]
    expected, expected_loss, _ = train(batch, whole(batch), case, mode)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    assert loss.item() == pytest.approx(expected_loss, rel=0, abs=1e-12)


@pytest.mark.parametrize("case", ["clip_cov", "kl_cov"])
def test_selecting_inside_the_micro_batch_would_change_the_gradient(case: str):
    batch = random_batch(NUM_ROWS)
    gradient, _, _ = train(batch, whole(batch), case, "token-mean")
    parts, _, _ = train(batch, ODD_PARTITIONS[0], case, "token-mean", prepare=False)
    assert not torch.allclose(parts, gradient)
