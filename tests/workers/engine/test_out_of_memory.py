"""Running out of memory in a pass costs time, never a wrong gradient."""

import logging

import pytest
import torch

from tests.tiny_models import tiny_model
from tests.utils.two_ranks import run_on_two_ranks
from tests.workers.engine.test_one_device import batch, engine, weighted_sum
from verl.config.optimizer import FSDPOptimizerConfig
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.passes import FittingPasses, RowDoesNotFitError, fill, halves
from verl.workers.engine.zero1 import Zero1Engine

ALL_ROWS = MicroBatching(rows=7)
LENGTHS = batch()["attention_mask"].sum(1).tolist()  # 5 10 4 3 6 6 8: 42 tokens
PLACES = ["forward", "backward of the first layer", "backward of the embedding", "loss"]


def run_out_of_memory(built, place, max_tokens):
    """From now on, passes with more tokens fail in that place of the model."""

    def check(num_tokens):
        if num_tokens > max_tokens:
            raise torch.OutOfMemoryError(f"{num_tokens} tokens")

    layers = built.module.model.layers
    if place == "forward":
        layers[1].register_forward_pre_hook(lambda _, args: check(args[0].shape[1]))
    elif place == "backward of the first layer":  # the second layer has its gradients already
        layers[0].register_full_backward_pre_hook(lambda _, grads: check(grads[0].shape[1]))
    elif place == "backward of the embedding":  # everything but the embedding has its gradient
        built.module.get_input_embeddings().register_forward_hook(
            lambda _, __, output: output.register_hook(lambda grad: check(grad.shape[1])) and None
        )


def train(built, place=None, max_tokens=10**6, **options):
    calls = []

    def loss(columns, rows):
        calls.append(len(rows))
        num_tokens = int(rows["attention_mask"].sum())
        if place == "loss" and num_tokens > max_tokens:
            raise torch.OutOfMemoryError(f"{num_tokens} tokens")
        value, report = weighted_sum(columns, rows)
        return value, {**report, "tokens": rows["response_mask"].sum()}

    run_out_of_memory(built, place, max_tokens)
    options = {"micro_batching": ALL_ROWS, **options}
    return built.train_batch(batch(), loss, **options), calls


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("max_tokens", [41, 20, 11])
def test_a_step_that_runs_out_of_memory_anywhere_is_the_step_of_a_larger_device(place, max_tokens):
    expected, small = engine(), engine()
    reference, _ = train(expected)
    result, _ = train(small, place, max_tokens)
    assert result.num_oom_splits > 0
    assert result.num_micro_batches == len(result.metrics) > 1
    assert result.loss == pytest.approx(reference.loss, rel=1e-5)
    assert result.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5)
    for (name, a), b in zip(
        small.module.named_parameters(), expected.module.parameters(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)
        assert a.requires_grad


@pytest.mark.parametrize("checkpointing", [False, True])
def test_earlier_micro_batches_keep_their_gradient_when_a_later_one_fails(checkpointing):
    cut = [[4, 5, 6], [0, 1, 2, 3]]  # 20 and 22 tokens
    expected, small = (engine("qwen3_moe", gradient_checkpointing=checkpointing) for _ in range(2))
    reference, _ = train(expected, micro_batching=cut)
    result, _ = train(small, PLACES[1], 21, micro_batching=cut)
    assert result.num_oom_splits == 1
    assert result.num_micro_batches == 3
    assert result.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5)
    for a, b in zip(small.module.parameters(), expected.module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_reports_are_those_of_the_passes_that_counted():
    result, calls = train(engine(), PLACES[1], 30)
    assert len(calls) > len(result.metrics), "the failed passes called the loss too"
    assert sum(report["rows"] for report in result.metrics) == 7
    assert sum(report["tokens"] for report in result.metrics) == batch()["response_mask"].sum()


def test_the_size_that_fits_is_remembered_and_said_once(caplog):
    built = engine()
    with caplog.at_level(logging.WARNING):
        first, _ = train(built, "forward", 30)
    assert first.num_oom_splits == len(caplog.records)
    assert f"{sum(LENGTHS)} tokens in 7 rows" in caplog.text
    assert "ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu" in caplog.text
    caplog.clear()
    second = built.train_batch(batch(), weighted_sum, micro_batching=ALL_ROWS)
    assert second.num_oom_splits == 0
    assert not caplog.records
    assert second.num_micro_batches > 1


def test_a_row_that_does_not_fit_alone_is_an_error_that_says_what_helps():
    built = engine()
    with pytest.raises(RowDoesNotFitError, match=rf"one row of {max(LENGTHS)} tokens") as caught:
        train(built, "forward", max(LENGTHS) - 1)
    for key in ("enable_gradient_checkpointing", "optimizer_offload", "max_response_length"):
        assert key in str(caught.value)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert all(p.requires_grad for p in built.module.parameters())


def test_scoring_runs_in_halves_too_and_every_row_gets_its_own_columns():
    data = batch()
    expected = engine().infer_batch(data, micro_batching=ALL_ROWS)
    small = engine()
    run_out_of_memory(small, "forward", 20)
    columns = small.infer_batch(data, micro_batching=ALL_ROWS)
    for name in expected:
        torch.testing.assert_close(columns[name], expected[name], rtol=1e-5, atol=1e-6)
    assert small.train_batch(data, weighted_sum, micro_batching=MicroBatching(rows=1)).is_applied


def test_what_is_not_about_memory_is_raised_as_it_is():
    built = engine()

    def broken(columns, rows):
        raise RuntimeError("the loss is wrong")

    with pytest.raises(RuntimeError, match="the loss is wrong"):
        built.train_batch(batch(), broken, micro_batching=ALL_ROWS)


def test_ranks_that_meet_inside_a_pass_do_not_split_it():
    class ExchangesInForward(OneDeviceEngine):
        has_collectives_in_forward = True

    config = FSDPOptimizerConfig(lr=0.1, optimizer="SGD", weight_decay=0.0)
    built = ExchangesInForward(lambda: tiny_model("llama"), config, max_grad_norm=1e9)
    built.initialize()
    with pytest.raises(torch.OutOfMemoryError):
        train(built, "forward", 30)


def test_a_rank_that_splits_alone_makes_the_step_of_all(tmp_path):
    passes = [[[0, 1, 2]], [[3, 4], [5, 6]]]  # 19 tokens, and at most 14

    def work(rank):
        config = FSDPOptimizerConfig(lr=0.1, optimizer="SGD", weight_decay=0.0)
        built = Zero1Engine(lambda: tiny_model("llama"), config, max_grad_norm=1e9)
        built.initialize()
        result, _ = train(built, PLACES[1], 15, micro_batching=passes[rank])
        return result.num_oom_splits, result.grad_norm

    expected, _ = train(engine())
    first, second = run_on_two_ranks(work, tmp_path)
    assert (first[0], second[0]) == (1, 1), "counted over all ranks"
    assert first[1] == second[1] == pytest.approx(expected.grad_norm, rel=1e-5)


def test_a_tied_weight_gets_the_gradient_of_a_split_micro_batch_once():
    expected, small = engine("qwen2"), engine("qwen2")
    assert tiny_model("qwen2").config.tie_word_embeddings
    train(expected)
    result, _ = train(small, PLACES[1], 30)
    assert result.num_oom_splits > 0
    for a, b in zip(small.module.parameters(), expected.module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_halves_are_as_equal_in_tokens_as_consecutive_rows_can_be():
    assert halves([0, 1, 2], [8, 1, 1]) == ([0], [1, 2])
    assert halves([0, 1, 2], [1, 1, 8]) == ([0, 1], [2])
    assert halves([5, 3], [0, 0, 0, 4, 0, 4]) == ([5], [3])
    assert halves([0, 1], [0, 0]) == ([0], [1])


def test_rows_are_filled_up_to_the_limit_and_one_that_exceeds_it_goes_alone():
    assert fill([0, 1, 2, 3], [3, 3, 3, 9], 6) == [[0, 1], [2], [3]]
    assert fill([], [], 6) == [[]], "a pass without rows is still a pass"


@pytest.mark.parametrize("limit", [None, 40])
def test_the_limit_is_never_raised_and_holds_for_what_waits_already(limit):
    passes, tried = FittingPasses("nothing"), []
    passes.max_tokens = limit

    def make_pass(rows):
        tried.append(rows)
        if len(rows) > 1:
            raise torch.OutOfMemoryError("too many rows")
        return rows

    rows = list(range(8))
    assert passes.run(rows, [10] * 8, make_pass) == [[row] for row in rows]
    assert passes.max_tokens == 10
    assert passes.num_splits == (3 if limit is None else 2), "every size failed once"
    assert tried[-6:] == [[2], [3], [4], [5], [6], [7]]


def test_after_a_failure_the_limit_is_the_larger_half():
    passes, tried = FittingPasses("nothing"), []

    def make_pass(rows):
        tried.append(rows)
        if len(rows) > 2:
            raise torch.OutOfMemoryError("too many rows")
        return rows

    assert passes.run([0, 1, 2], [5, 5, 5], make_pass) == [[0], [1, 2]]
    assert passes.max_tokens == 10
    assert passes.run([3, 4, 5], [5] * 6, make_pass) == [[3, 4], [5]]
    assert tried == [[0, 1, 2], [0], [1, 2], [3, 4], [5]]
