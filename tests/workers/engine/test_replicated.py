"""Two ranks with a half of the rows each make the step that one rank makes on all of them."""

import pytest
import torch
from torch import nn

from tests.tiny_models import tiny_model
from tests.utils.two_ranks import run_on_two_ranks
from tests.workers.engine.test_one_device import batch, weighted_sum
from verl.config.optimizer import FSDPOptimizerConfig
from verl.workers.engine import sharding
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.sharding import in_buckets
from verl.workers.engine.zero1 import ReplicatedEngine

SHARES = {"even": [[0, 2, 4, 6], [1, 3, 5]], "nothing for rank 1": [[0, 1, 2, 3, 4, 5, 6], []]}


def built(kind, optimizer="SGD", **options):
    config = FSDPOptimizerConfig(lr=0.1, optimizer=optimizer, weight_decay=0.0)
    engine = kind(lambda: tiny_model("llama"), config, **{"max_grad_norm": 0.5, **options})
    engine.initialize()
    return engine


def weights(engine):
    return {name: p.detach().numpy().copy() for name, p in engine.module.named_parameters()}


def two_steps(engine, rows):
    part = batch()[rows]
    losses, norms = [], []
    for _ in range(2):
        result = engine.train_batch(part, weighted_sum, micro_batching=MicroBatching(rows=2))
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return losses, norms, weights(engine)


@pytest.mark.parametrize("share", SHARES)
def test_two_ranks_make_the_step_of_one(share, tmp_path):
    expected_losses, expected_norms, expected = two_steps(built(OneDeviceEngine), list(range(7)))

    def work(rank):
        return two_steps(built(ReplicatedEngine), SHARES[share][rank])

    answers = run_on_two_ranks(work, tmp_path)
    for losses, norms, found in answers:
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        for name, value in expected.items():
            torch.testing.assert_close(
                torch.tensor(found[name]), torch.tensor(value), rtol=0, atol=1e-6
            )
    for name, value in answers[0][2].items():
        assert (value == answers[1][2][name]).all(), f"the ranks differ in {name}"


def test_a_gradient_that_is_not_finite_on_one_rank_is_applied_on_none(tmp_path):
    def work(rank):
        engine = built(ReplicatedEngine)
        before = weights(engine)

        def loss(columns, rows):
            found, report = weighted_sum(columns, rows)
            return found * (torch.nan if rank == 1 else 1.0), report

        result = engine.train_batch(batch(), loss, micro_batching=MicroBatching(rows=7))
        after = weights(engine)
        return result.is_applied, all((before[name] == after[name]).all() for name in before)

    assert run_on_two_ranks(work, tmp_path) == [(False, True), (False, True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_starts_from_the_weights_of_rank_0(dtype, tmp_path):
    def work(rank):
        def model():
            made = tiny_model("llama").to(dtype)
            with torch.no_grad():
                made.model.norm.weight.fill_(10.0 + rank)
            return made

        engine = ReplicatedEngine(model, FSDPOptimizerConfig())
        engine.initialize()
        weight = engine.module.model.norm.weight
        master = engine.optimizer.masters["model.norm.weight"]
        sizes = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
        return sizes, weight[0].item(), master[0].item()

    assert run_on_two_ranks(work, tmp_path) == [((0, 2), 10.0, 10.0), ((1, 2), 10.0, 10.0)]


def test_buckets_hold_every_parameter_once_in_order(monkeypatch):
    monkeypatch.setattr(sharding, "BUCKET_ELEMENTS", 5)
    sizes = {"a": 2, "b": 3, "c": 9, "d": 1, "e": 1}
    parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    assert list(in_buckets(parameters)) == [["a", "b"], ["c"], ["d", "e"]]
    parameters["b"] = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    assert list(in_buckets(parameters)) == [["a"], ["b"], ["c"], ["d", "e"]]
