"""Ranks with whole weights and sharded optimizer state make the step that one rank makes."""

from copy import deepcopy

import pytest
import torch

from tests.tiny_models import tiny_model
from tests.utils.two_ranks import run_on_two_ranks
from tests.workers.engine.test_one_device import batch, weighted_sum
from verl.config.optimizer import FSDPOptimizerConfig
from verl.utils.checkpoint.pieces import FlatSlice
from verl.workers.engine import sharding
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.memory import MemoryOptions
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.zero1 import Zero1Engine

SHARES = {"even": [[0, 2, 4, 6], [1, 3, 5]], "nothing for rank 1": [[0, 1, 2, 3, 4, 5, 6], []]}


def built(kind, optimizer="SGD", model="qwen2", **options):
    momentum = {"momentum": 0.9} if optimizer == "SGD" else None
    config = FSDPOptimizerConfig(
        lr=0.05 if momentum else 0.01,
        optimizer=optimizer,
        weight_decay=0.1,
        override_optimizer_config=momentum,
    )
    engine = kind(lambda: tiny_model(model), config, **{"max_grad_norm": 0.5, **options})
    engine.initialize()
    return engine


def weights(engine):
    return {name: p.detach().float().numpy().copy() for name, p in engine.module.named_parameters()}


def two_steps(engine, rows):
    part = batch()[rows]
    results = [
        engine.train_batch(part, weighted_sum, micro_batching=MicroBatching(rows=2))
        for _ in range(2)
    ]
    return [r.loss for r in results], [r.grad_norm for r in results], weights(engine)


def test_two_ranks_make_the_steps_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr(sharding, "BUCKET_ELEMENTS", 3000)  # several buckets
    kinds = [("even", "AdamW"), *((share, "SGD") for share in SHARES)]
    expected = {name: two_steps(built(OneDeviceEngine, name), range(7)) for _, name in kinds}

    def work(rank):
        answers = []
        for share, name in kinds:
            engine = built(Zero1Engine, name)
            addresses = [p.data_ptr() for p in engine.module.parameters()]
            answers.append(two_steps(engine, SHARES[share][rank]))
            assert addresses == [p.data_ptr() for p in engine.module.parameters()]
            held = sum(master.numel() for master in engine.optimizer.masters.values())
            whole = sum(p.numel() for p in engine.module.parameters())
            assert held == whole / 2, "each rank keeps half of the masters"
        return answers

    on_ranks = run_on_two_ranks(work, tmp_path)
    for answers in on_ranks:
        for (_, name), (losses, norms, found) in zip(kinds, answers, strict=True):
            assert losses == pytest.approx(expected[name][0], rel=1e-5)
            assert norms == pytest.approx(expected[name][1], rel=1e-5)
            for key, value in expected[name][2].items():
                # Adam divides by the gradient's size, so rounding shows where that is near 0.
                tolerance = 1e-6 if name == "SGD" else 1e-4
                assert abs(found[key] - value).max() < tolerance, key
    for on_first, on_second in zip(*on_ranks, strict=True):
        for key, value in on_first[2].items():
            assert (value == on_second[2][key]).all(), f"the ranks differ in {key}"


@pytest.mark.slow
def test_state_that_waits_in_cpu_memory_gives_the_same_bits(tmp_path):
    def work(rank):
        rows, parked = SHARES["even"][rank], MemoryOptions(optimizer_offload=True)
        found = [
            two_steps(built(Zero1Engine, "AdamW", memory=memory), rows)[2]
            for memory in (None, parked)
        ]
        return all((value == found[1][key]).all() for key, value in found[0].items())

    assert run_on_two_ranks(work, tmp_path) == [True, True]


def test_a_gradient_that_is_not_finite_on_one_rank_is_applied_on_none(tmp_path):
    def work(rank):
        engine = built(Zero1Engine)
        before = weights(engine)

        def loss(columns, rows):
            found, report = weighted_sum(columns, rows)
            return found * (torch.nan if rank == 1 else 1.0), report

        result = engine.train_batch(batch(), loss, micro_batching=MicroBatching(rows=7))
        after = weights(engine)
        return result.is_applied, all((before[name] == after[name]).all() for name in before)

    assert run_on_two_ranks(work, tmp_path) == [(False, True), (False, True)]


def test_every_rank_starts_from_the_weights_of_rank_0_and_keeps_fp32_masters(tmp_path):
    def work(rank):
        def model():
            made = tiny_model("llama").to(torch.bfloat16)
            with torch.no_grad():
                made.model.norm.weight.fill_(10.0 + rank)
            return made

        engine = Zero1Engine(model, FSDPOptimizerConfig(lr=1e-4, weight_decay=0.0))
        engine.initialize()
        weight = engine.module.model.norm.weight
        master = engine.optimizer.masters["model.norm.weight"]
        sizes = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
        found = (sizes, weight[0].item(), master[0].item(), master.dtype == torch.float32)
        engine.train_batch(batch(), weighted_sum, micro_batching=MicroBatching(rows=7))
        assert weight[0].item() == 10.0  # too small a step for bf16
        assert (master != 10.0).any()  # which the master remembers
        with torch.no_grad():
            weight.fill_(3.0)  # somebody loads other weights
        engine.train_batch(batch(), weighted_sum, micro_batching=MicroBatching(rows=7))
        assert (master - 3.0).abs().max() < 0.01
        return found

    answers = run_on_two_ranks(work, tmp_path)
    assert answers == [((rank, 2), 10.0, 10.0, True) for rank in range(2)]


def test_a_rank_resumes_from_its_own_part_of_the_state(tmp_path):
    def work(rank):
        rows = SHARES["even"][rank]
        first, second = built(Zero1Engine, "AdamW"), built(Zero1Engine, "AdamW")
        two_steps(first, rows)
        state = deepcopy(first.state_dict())
        shape = state["optimizer"]["masters"]["model.embed_tokens.weight"].shape
        moments = state["optimizer"]["optimizer"]["state"][0]
        assert {type(moments[key]) for key in ("exp_avg", "exp_avg_sq")} == {FlatSlice}
        assert moments["exp_avg"].start == rank * 96 * 32 // 2
        second.load_state_dict(state)
        assert second.policy_version == 2
        a, b = two_steps(first, rows), two_steps(second, rows)
        return shape, a[:2] == b[:2], all((a[2][name] == b[2][name]).all() for name in a[2])

    assert run_on_two_ranks(work, tmp_path) == [((96, 32), True, True)] * 2


def test_an_optimizer_that_looks_at_matrices_is_refused(tmp_path):
    def work(rank):
        with pytest.raises(ValueError, match="Adafactor, which looks at whole matrices"):
            built(Zero1Engine, "Adafactor")

    run_on_two_ranks(work, tmp_path)


def test_without_a_process_group_the_engine_says_what_to_call():
    with pytest.raises(ValueError, match="initialize_global_process_group"):
        built(Zero1Engine)
