"""The drift check: an engine that is not at the trainer's weights fails it after an update."""

import pytest
import torch

from tests.tiny_models import VOCABULARY, tiny_model
from tests.workers.rollout.faulty_engine import FaultyEngine, trained_policy
from tests.workers.rollout.helpers import training_log_probs
from verl.workers.rollout.probe import (
    METRIC,
    FixedPromptCheck,
    StaleEngineError,
    default_tolerance,
    fixed_prompt,
    fixed_request,
    prompt_lengths,
)


def drift_check(tolerance=0.05):
    return FixedPromptCheck(vocabulary=VOCABULARY, max_model_len=176, tolerance=tolerance)


@pytest.fixture
def pair():
    """A policy in training with its own weights, and an engine with a copy."""
    model = tiny_model("llama")
    engine = FaultyEngine(model)
    policy, training = trained_policy(model, engine.update)
    return engine, policy, training


def test_engines_at_the_same_weights_differ_by_rounding(pair):
    engine, policy, _ = pair
    assert 0 <= drift_check().check(engine, policy)[METRIC] < 1e-4


def test_the_metric_is_the_largest_difference_of_a_log_probability(pair):
    engine, policy, training = pair
    with torch.no_grad():
        training.module.lm_head.weight.mul_(1.001)
    check = drift_check()
    request = fixed_request(check.prompt_ids, max_tokens=check.num_tokens)
    (output,) = engine.generate_batch([request])[0]
    expected = training_log_probs(training.module, check.prompt_ids, output.token_ids)
    by_hand = float((torch.tensor(output.log_probs) - expected).abs().max())
    assert by_hand > 1e-4
    assert check.check(engine, policy)[METRIC] == pytest.approx(by_hand, rel=0.05)


def test_weights_that_were_not_taken_over_stop_the_run_and_name_the_versions(pair):
    engine, policy, training = pair
    with torch.no_grad():
        training.module.model.layers[0].mlp.down_proj.weight.mul_(-1)
    with pytest.raises(StaleEngineError, match=r"version \[0\].*trainer has version 0.*up to"):
        drift_check().check(engine, policy)
    policy.send(is_scrambled=False)
    drift_check().check(engine, policy)


def test_the_right_weights_under_the_wrong_version_stop_the_run_too(pair):
    engine, policy, training = pair
    training.policy_version = 7
    with pytest.raises(StaleEngineError, match=r"version \[0\].*trainer has version 7"):
        drift_check().check(engine, policy)


def test_numbers_that_are_not_finite_never_pass(pair):
    engine, policy, _ = pair
    engine._reports = lambda *_: [float("nan")] * 8
    with pytest.raises(StaleEngineError, match="up to inf"):
        drift_check(tolerance=1e9).check(engine, policy)


def test_a_rank_without_an_engine_only_helps_to_score(pair):
    _, policy, _ = pair
    assert drift_check().check(None, policy) == {}


def test_the_prompt_is_fixed_and_keeps_away_from_special_tokens():
    assert fixed_prompt(1000, 50) == fixed_prompt(1000, 50)
    assert fixed_prompt(1000, 50) != fixed_prompt(1000, 50, number=1)
    ids = fixed_prompt(1000, 500)
    assert min(ids) >= 250
    assert max(ids) < 750
    assert len(set(ids)) > 200


def test_lengths_fit_the_longest_sequence():
    assert prompt_lengths(4096, 8) == (8, 144)
    assert prompt_lengths(100, 24) == (24, 76)
    assert prompt_lengths(14, 8) == (7, 7)


def test_the_coarsest_number_format_sets_the_tolerance():
    assert default_tolerance("float32") == 0.05
    assert default_tolerance("float32", "bf16", None) == 0.25
    assert default_tolerance("bfloat16", "fp8") == 1.0
    with pytest.raises(ValueError, match="canary_tolerance"):
        default_tolerance("int3")
