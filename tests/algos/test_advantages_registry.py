"""How users add estimators and losses, and what happens when a name is taken."""

import pytest
import torch

from tests.registries import restored
from verl.algos.registry import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    AdvantageEstimator,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    loss_and_metrics,
    register_adv_est,
    register_policy_loss,
    weights_argument,
)


@pytest.fixture
def own_names():
    """Names under which a test may register; they are free again afterwards."""
    with restored(ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY):
        yield


def test_every_member_of_the_enum_is_registered_under_its_value():
    for estimator in AdvantageEstimator:
        assert get_adv_estimator_fn(estimator) is get_adv_estimator_fn(estimator.value)
        assert estimator.value in ADV_ESTIMATOR_REGISTRY
    assert set(ADV_ESTIMATOR_REGISTRY) == {estimator.value for estimator in AdvantageEstimator}


def test_the_functions_have_the_names_of_the_table():
    assert get_adv_estimator_fn("gae").__name__ == "compute_gae_advantage_return"
    tir = get_adv_estimator_fn(AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE)
    assert tir.__name__ == "compute_multi_turn_optimal_token_baseline_advantage"


def test_a_user_adds_an_estimator_and_finds_it(own_names):
    @register_adv_est("mine")
    def mine():
        return "mine"

    assert mine() == "mine"  # the decorator gives the function back
    assert get_adv_estimator_fn("mine") is mine


def test_a_users_function_replaces_a_built_in_of_the_same_name(own_names):
    @register_adv_est(AdvantageEstimator.GRPO)
    def mine():
        pass

    assert get_adv_estimator_fn("grpo") is mine


def test_a_table_that_was_emptied_and_filled_again_knows_what_is_built_in(own_names):
    before = dict(ADV_ESTIMATOR_REGISTRY.items())
    ADV_ESTIMATOR_REGISTRY.clear()
    ADV_ESTIMATOR_REGISTRY.update(before)

    @register_adv_est("grpo")
    def mine():
        pass

    assert get_adv_estimator_fn("grpo") is mine


def test_registering_the_same_function_again_is_allowed_but_another_is_not(own_names):
    def first():
        pass

    register_adv_est("mine")(first)
    register_adv_est("mine")(first)
    with pytest.raises(ValueError, match="'mine' is already registered"):
        register_adv_est("mine")(lambda: None)


def test_an_unknown_name_is_refused_with_a_suggestion():
    with pytest.raises(
        ValueError, match=r"unknown advantage estimator 'gpro'\. Did you mean 'grpo'"
    ):
        get_adv_estimator_fn("gpro")
    with pytest.raises(ValueError, match="unknown policy loss 'nothing-like-it'"):
        get_policy_loss_fn("nothing-like-it")


def test_a_policy_loss_is_found_with_dashes_or_underscores(own_names):
    @register_policy_loss("my_loss")
    def my_loss():
        pass

    assert get_policy_loss_fn("my_loss") is my_loss
    assert get_policy_loss_fn("my-loss") is my_loss


def test_policy_losses_may_return_four_numbers():
    assert loss_and_metrics((1.0, {"a": 2.0})) == (1.0, {"a": 2.0})
    loss, metrics = loss_and_metrics((1.0, 0.1, 0.2, 0.3))
    assert loss == 1.0
    assert metrics == {
        "actor/pg_clipfrac": 0.1, "actor/ppo_kl": 0.2, "actor/pg_clipfrac_lower": 0.3,
    }  # fmt: skip


def test_a_policy_loss_of_the_older_signature_does_without_weights():
    def older(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
        pass

    def newer(log_prob, rollout_is_weights=None):
        pass

    weights = torch.ones(1)
    assert weights_argument(older, None) == {}
    assert weights_argument(newer, weights) == {"rollout_is_weights": weights}
    assert weights_argument(lambda **any_keyword: None, None) == {"rollout_is_weights": None}
    with pytest.raises(ValueError, match=r"no parameter rollout_is_weights.*rollout_is to null"):
        weights_argument(older, weights)
