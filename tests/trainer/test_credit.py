"""From scores to advantages on a batch: the KL penalty, and what each estimator is given."""

import numpy as np
import pytest
import torch

from tests.registries import restored
from verl.algos.kl import AdaptiveKLController, FixedKLController
from verl.algos.registry import ADV_ESTIMATOR_REGISTRY, AdvantageEstimator, register_adv_est
from verl.config.algorithm import AlgoConfig, PFPPOConfig
from verl.protocol import DataProto
from verl.trainer.ppo.credit import apply_kl_penalty, compute_advantage, compute_response_mask

# Two prompts with two responses each: rewards 1, 3 and 0, 1, paid on the last token.
MASK = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1]])
REWARDS = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 0.0], [0.0, 1.0]])
GROUPS = np.array(["a", "a", "b", "b"], dtype=object)


def make_batch(**columns):
    tensors = {"response_mask": MASK, "token_level_rewards": REWARDS, **columns}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": GROUPS})


@pytest.fixture
def own_estimators():
    """Names under which a test may register; they are free again afterwards."""
    with restored(ADV_ESTIMATOR_REGISTRY):
        yield


# ---- compute_advantage


@pytest.mark.parametrize("estimator", list(AdvantageEstimator))
@pytest.mark.parametrize("spelling", ["enum", "name"])
@pytest.mark.parametrize("config", [None, AlgoConfig()])
def test_every_built_in_estimator_gets_what_it_needs(estimator, spelling, config):
    batch = make_batch(
        values=torch.zeros(4, 2),
        reward_baselines=torch.zeros(4),
        old_log_probs=torch.full((4, 2), -0.7),
        sum_pi_squared=torch.full((4, 2), 0.5),
    )
    name = estimator if spelling == "enum" else estimator.value
    batch = compute_advantage(batch, name, config=config)
    for column in ("advantages", "returns"):
        assert batch.batch[column].shape == (4, 2)
        assert torch.isfinite(batch.batch[column]).all()
        assert batch.batch[column][2, 1] == 0  # masked
    assert batch.batch["advantages"].any()


def test_grpo_compares_by_uid_and_takes_the_option():
    batch = compute_advantage(make_batch(), "grpo", norm_adv_by_std_in_grpo=False)
    assert batch.batch["advantages"].tolist() == [[-1, -1], [1, 1], [-0.5, 0], [0.5, 0.5]]
    normalised = compute_advantage(make_batch(), "grpo").batch["advantages"][1, 0].item()
    assert normalised == pytest.approx(1 / (2**0.5 + 1e-6))


@pytest.mark.parametrize("name", ["grpo_vectorized", "grpo"])
def test_no_estimator_of_the_family_ignores_the_option(name):
    batch = compute_advantage(make_batch(), name, norm_adv_by_std_in_grpo=False)
    assert batch.batch["advantages"][0, 0] == -1


def test_one_prompt_drawn_twice_makes_two_groups():
    batch = make_batch()
    batch.non_tensor_batch["index"] = np.array([7, 7, 7, 7])  # the same row of the dataset
    batch = compute_advantage(batch, "rloo")
    assert batch.batch["advantages"][:, 0].tolist() == [-2, 2, -1, 1]


def test_the_datasets_index_column_never_stands_in_for_the_uid():
    batch = DataProto.from_dict(
        tensors={"response_mask": MASK, "token_level_rewards": REWARDS},
        non_tensors={"index": np.array([7, 7, 8, 8])},
    )
    with pytest.raises(ValueError, match=r"'grpo' requires 'index'.*`uid`"):
        compute_advantage(batch, "grpo")


def test_gae_uses_gamma_and_lambda():
    batch = make_batch(values=torch.full((4, 2), 0.5))
    batch = compute_advantage(batch, "gae", gamma=0.9, lam=0.8)
    # First row: delta = 0.9 * 0.5 - 0.5, 1 - 0.5; A = -0.05 + 0.72 * 0.5, 0.5.
    assert batch.batch["returns"][0].tolist() == pytest.approx([0.81, 1.0])


def test_a_batch_without_a_response_mask_gets_one_from_its_attention_mask():
    attention = torch.cat([torch.tensor([[0, 1, 1]] * 4), MASK], dim=1)
    batch = DataProto.from_dict(
        tensors={
            "responses": torch.zeros(4, 2, dtype=torch.long),
            "attention_mask": attention,
            "token_level_rewards": REWARDS,
        },
        non_tensors={"uid": GROUPS},
    )
    assert torch.equal(compute_response_mask(batch), MASK)
    batch = compute_advantage(batch, "rloo")
    assert torch.equal(batch.batch["response_mask"], MASK)
    assert batch.batch["advantages"].tolist() == [[-2, -2], [2, 2], [-1, 0], [1, 1]]


def test_a_users_estimator_gets_the_keywords_of_the_contract(own_estimators):
    seen = {}

    @register_adv_est("mine")
    def mine(token_level_rewards, response_mask, config=None, **kwargs):
        seen.update(kwargs, config=config)
        return token_level_rewards * 2, token_level_rewards * 3

    config = AlgoConfig()
    batch = make_batch(reward_baselines=torch.zeros(4), values=torch.zeros(4, 2))
    batch = compute_advantage(batch, "mine", config=config)
    assert torch.equal(batch.batch["advantages"], REWARDS * 2)
    assert torch.equal(batch.batch["returns"], REWARDS * 3)
    assert seen.pop("config") is config
    assert seen.pop("index").tolist() == GROUPS.tolist()
    assert torch.equal(seen.pop("reward_baselines"), torch.zeros(4))
    assert seen == {}


def test_a_users_estimator_may_ask_for_any_column_or_option(own_estimators):
    @register_adv_est("mine")
    def mine(token_level_rewards, ref_log_prob, gamma, uid):
        assert uid.tolist() == GROUPS.tolist()
        result = token_level_rewards + gamma * ref_log_prob
        return result, result

    batch = make_batch(ref_log_prob=torch.ones(4, 2))
    batch = compute_advantage(batch, "mine", gamma=0.5)
    torch.testing.assert_close(batch.batch["advantages"], REWARDS + 0.5)


def test_a_users_estimator_keeps_its_own_defaults(own_estimators):
    @register_adv_est("mine")
    def mine(token_level_rewards, scale=4.0):
        return token_level_rewards * scale, token_level_rewards

    assert compute_advantage(make_batch(), "mine").batch["advantages"].max() == 12


@pytest.mark.parametrize("name", ["gae", "grpo"])
def test_a_users_function_under_a_built_in_name_is_the_one_that_runs(own_estimators, name):
    @register_adv_est(name)
    def mine(token_level_rewards, response_mask, config, **kwargs):
        return token_level_rewards + 1, token_level_rewards

    batch = compute_advantage(make_batch(), name)
    assert torch.equal(batch.batch["advantages"], REWARDS + 1)


def test_an_argument_that_cannot_be_given_is_named_with_the_estimator(own_estimators):
    @register_adv_est("mine")
    def mine(token_level_rewards, horoscope):
        raise AssertionError

    with pytest.raises(ValueError, match=r"'mine' requires 'horoscope'.*there is: .*uid"):
        compute_advantage(make_batch(), "mine")
    with pytest.raises(ValueError, match=r"'gae' requires 'values'.*critic"):
        compute_advantage(make_batch(), "gae")
    with pytest.raises(ValueError, match="'remax' requires 'reward_baselines'"):
        compute_advantage(make_batch(), "remax")
    with pytest.raises(ValueError, match=r"requires 'sum_pi_squared'.*calculate_sum_pi_squared"):
        compute_advantage(make_batch(old_log_probs=REWARDS), "optimal_token_baseline")


def test_a_positional_only_parameter_is_refused(own_estimators):
    @register_adv_est("mine")
    def mine(token_level_rewards, /):
        raise AssertionError

    with pytest.raises(ValueError, match="positional-only parameter 'token_level_rewards'"):
        compute_advantage(make_batch(), "mine")


def test_a_reward_that_is_no_number_stops_even_a_users_estimator(own_estimators):
    @register_adv_est("mine")
    def mine(token_level_rewards):
        raise AssertionError

    bad = REWARDS.clone()
    bad[3, 1] = float("nan")
    with pytest.raises(ValueError, match=r"row 3\b"):
        compute_advantage(make_batch(token_level_rewards=bad), "mine")


def test_missing_rewards_and_unknown_estimators_are_refused():
    with pytest.raises(ValueError, match="unknown advantage estimator 'grop'"):
        compute_advantage(make_batch(), "grop")
    batch = DataProto.from_dict(tensors={"response_mask": MASK})
    with pytest.raises(ValueError, match="'token_level_rewards'; the batch has: response_mask"):
        compute_advantage(batch, "grpo")


def test_pf_ppo_draws_the_batch_anew_under_gae():
    scores = torch.tensor([[0.0, 0.0], [0.0, 2.0], [0.0, 0.0], [0.0, 0.0]])
    batch = make_batch(values=torch.zeros(4, 2), token_level_scores=scores)
    config = AlgoConfig(use_pf_ppo=True, pf_ppo=PFPPOConfig(reweight_method="pow"))
    drawn = compute_advantage(batch, "gae", config=config)
    assert drawn.batch["token_level_rewards"].tolist() == [[0.0, 3.0]] * 4  # only row 1 has weight
    assert drawn.batch["returns"].tolist() == [[3.0, 3.0]] * 4
    assert drawn.non_tensor_batch["uid"].tolist() == ["a"] * 4


def test_pf_ppo_with_another_estimator_is_refused_instead_of_ignored():
    with pytest.raises(ValueError, match=r"use_pf_ppo=True works with .*gae only, not 'grpo'"):
        compute_advantage(make_batch(), "grpo", config=AlgoConfig(use_pf_ppo=True))


# ---- apply_kl_penalty


def kl_batch():
    """Row KLs (k1): 1 and 2 over two tokens; 4 over one; a fully masked row that must not count."""
    return DataProto.from_dict(
        tensors={
            "response_mask": torch.tensor([[1, 1], [1, 0], [0, 0]]),
            "token_level_scores": torch.tensor([[0.0, 1.0], [5.0, 0.0], [0.0, 0.0]]),
            "old_log_probs": torch.tensor([[-1.0, -1.0], [-1.0, 50.0], [50.0, 50.0]]),
            "ref_log_prob": torch.tensor([[-2.0, -3.0], [-5.0, 0.0], [0.0, 0.0]]),
        }
    )


def test_the_penalty_is_charged_on_trained_tokens_only():
    batch, metrics = apply_kl_penalty(kl_batch(), FixedKLController(0.1))
    expected = torch.tensor([[-0.1, 0.8], [4.6, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(batch.batch["token_level_rewards"], expected)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((1.5 + 4) / 2)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1


def test_the_reported_kl_is_the_one_that_was_charged():
    batch, metrics = apply_kl_penalty(kl_batch(), FixedKLController(0.5), kl_penalty="k2")
    charged = (batch.batch["token_level_scores"] - batch.batch["token_level_rewards"]) / 0.5
    mask = batch.batch["response_mask"]
    per_response = charged.sum(-1)[:2] / mask.sum(-1)[:2]
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(per_response.mean().item())
    assert charged[0].tolist() == [0.5, 2.0]


def test_the_controller_moves_after_the_charge_by_the_number_of_responses():
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=2.5, horizon=100)
    _, metrics = apply_kl_penalty(kl_batch(), controller)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1  # what was in force
    assert controller.value == pytest.approx(0.1 * (1 + (2.75 / 2.5 - 1) * 2 / 100))


def test_equal_policies_are_charged_nothing():
    batch = kl_batch()
    batch.batch["ref_log_prob"] = batch.batch["old_log_probs"].clone()
    batch, metrics = apply_kl_penalty(batch, FixedKLController(0.1), kl_penalty="low_var_kl")
    assert torch.equal(batch.batch["token_level_rewards"], batch.batch["token_level_scores"])
    assert metrics["actor/reward_kl_penalty"] == 0


def test_a_batch_without_any_trained_token_is_charged_nothing():
    batch = kl_batch()
    batch.batch["response_mask"] = torch.zeros(3, 2, dtype=torch.long)
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=2.5, horizon=100)
    batch, metrics = apply_kl_penalty(batch, controller)
    assert torch.equal(batch.batch["token_level_rewards"], batch.batch["token_level_scores"])
    assert metrics["actor/reward_kl_penalty"] == 0
    assert controller.value == 0.1


def test_the_penalty_names_what_is_missing():
    batch = kl_batch()
    del batch.batch["ref_log_prob"]
    with pytest.raises(ValueError, match="the KL penalty needs the column 'ref_log_prob'"):
        apply_kl_penalty(batch, FixedKLController(0.1))


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "gae", "opo"])
def test_the_penalty_reaches_the_advantages_under_every_estimator(estimator):
    """A response that drifted from the reference is worth less, with the same score."""
    drift = torch.zeros(4, 2)
    drift[0] = -3.0
    batch = make_batch(
        token_level_scores=torch.ones(4, 2) * MASK,
        old_log_probs=torch.zeros(4, 2),
        ref_log_prob=drift,
        values=torch.zeros(4, 2),
    )
    batch, _ = apply_kl_penalty(batch, FixedKLController(0.1))
    advantages = compute_advantage(batch, estimator).batch["advantages"]
    assert advantages[0, 0] < advantages[1, 0]


# ---- the import path


@pytest.mark.slow
def test_the_trainer_module_offers_the_helpers_without_loading_ray():
    import subprocess
    import sys

    code = (
        "import sys; from verl.trainer.ppo.ray_trainer import apply_kl_penalty, "
        "compute_advantage, compute_response_mask; print('ray' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "False", result.stderr
