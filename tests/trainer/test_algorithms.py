"""Every algorithm, chosen by the keys that users know, takes two steps that are finite and move."""

import math

import pytest
import torch

from tests.toy import ACTOR, ROLLOUT, toy_run, weights
from verl.agent_loop.buffer import TooFewGroups
from verl.models.loading import load_causal_lm

SMALL = ["data.max_response_length=4", f"{ROLLOUT}.n=3"]


def small_run(toy, output, *changes):
    """With a reward that half of all responses earn: there is something to learn at once."""
    return toy_run(
        toy, output, *SMALL, f"custom_reward_function.path={toy / 'parity.py'}", *changes
    )


def estimator(name, *more):
    return [f"algorithm.adv_estimator={name}", *more]


def loss(name, *more):
    return [f"{ACTOR}.policy_loss.loss_mode={name}", *more]


KL_LOSS = [f"{ACTOR}.use_kl_loss=true"]
FILTER = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"]
ALGORITHMS = {
    "ppo": estimator("gae", f"{ROLLOUT}.n=1"),
    "ppo with two epochs and mini-batches": estimator(
        "gae", f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.ppo_mini_batch_size=2"
    ),
    "ppo with KL in the reward": estimator("gae", "algorithm.use_kl_in_reward=true"),
    "ppo with an adaptive KL": estimator(
        "gae", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"
    ),
    "ppo with a critic that warms up": estimator("gae", "trainer.critic_warmup=2"),
    "policy-filtered ppo": estimator("gae", "algorithm.use_pf_ppo=true"),
    "grpo": estimator("grpo", *KL_LOSS),
    "grpo with k2 and token budgets": estimator(
        "grpo", *KL_LOSS, f"{ACTOR}.kl_loss_type=k2", f"{ACTOR}.use_dynamic_bsz=true",
        f"{ACTOR}.ppo_max_token_len_per_gpu=20",
    ),
    "dr_grpo": estimator(
        "grpo", "algorithm.norm_adv_by_std_in_grpo=false",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    ),
    "grpo_passk": estimator("grpo_passk"),
    "rloo": estimator("rloo", "algorithm.use_kl_in_reward=true"),
    "reinforce++": estimator("reinforce_plus_plus"),
    "reinforce++ baseline": estimator("reinforce_plus_plus_baseline"),
    "remax": estimator("remax", f"{ROLLOUT}.n=1"),
    "opo": estimator("opo"),
    "gpg": estimator("gpg", *loss("gpg")),
    "dapo": estimator(
        "grpo", *FILTER, f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.28",
        "data.gen_batch_size=8", "reward_model.reward_manager=dapo",
        "+reward_model.reward_kwargs.max_resp_len=4",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=true",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.len=2",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.log=true",
    ),
    "optimal_token_baseline": estimator(
        "optimal_token_baseline", f"{ACTOR}.calculate_sum_pi_squared=true"
    ),
    "tir_optimal_token_baseline": estimator(
        "tir_optimal_token_baseline", f"{ACTOR}.calculate_sum_pi_squared=true"
    ),
    "gspo": loss("gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"),
    "cispo": loss("cispo"),
    "clip_cov": loss("clip_cov"),
    "kl_cov": loss("kl_cov"),
    "geo_mean": loss("geo_mean"),
    "sapo": loss("sapo"),
    "truncated importance sampling": ["algorithm.rollout_correction.rollout_is=token"],
    "bypass of the old policy": ["algorithm.rollout_correction.bypass_mode=true"],
    "entropy bonus": [f"{ACTOR}.entropy_coeff=0.01"],
}  # fmt: skip


@pytest.fixture(scope="module")
def start(toy):
    return dict(load_causal_lm(str(toy / "model")).named_parameters())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_steps_are_finite_and_the_weights_move(toy, tmp_path, start, name):
    changes = [change.removeprefix("+") for change in ALGORITHMS[name]]
    metrics, trainer = small_run(toy, tmp_path, *changes)
    assert [step["step"] for step in metrics] == [1, 2]
    for step in metrics:
        numbers = {k: v for k, v in step.items() if isinstance(v, float)}
        assert all(map(math.isfinite, numbers.values())), numbers
    after = weights(trainer)
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert any(not torch.equal(after[key], start[key]) for key in after)


def run(toy, tmp_path, name, *more):
    changes = [change.removeprefix("+") for change in ALGORITHMS[name]]
    return small_run(toy, tmp_path, *changes, *more)


def test_exact_mode_leaves_the_old_log_prob_pass_out_because_it_would_change_nothing(toy, tmp_path):
    exact, _ = small_run(toy, tmp_path / "exact", f"{ROLLOUT}.exact=true")
    usual, _ = small_run(toy, tmp_path / "usual")
    for step in exact:
        assert step["training/old_log_prob_pass_skipped"] == 1
        assert step["actor/old_log_prob_error"] == 0.0, "training has the sampler's own numbers"
        assert "timing_s/old_log_prob" not in step
        assert step["actor/entropy"] > 0
    assert usual[0]["training/old_log_prob_pass_skipped"] == 0
    assert usual[0]["actor/pg_loss"] == pytest.approx(exact[0]["actor/pg_loss"], abs=1e-6)


def test_the_rollouts_log_probs_stand_in_for_the_old_policys_when_asked(toy, tmp_path):
    metrics, trainer = small_run(toy, tmp_path, f"{ACTOR}.use_rollout_log_probs=true")
    batch = trainer.batch.batch
    assert torch.equal(batch["old_log_probs"], batch["rollout_log_probs"])
    assert metrics[0]["training/old_log_prob_pass_skipped"] == 1


def test_the_actor_rests_while_the_critic_warms_up(toy, tmp_path, start):
    changes = ["trainer.critic_warmup=2", "trainer.total_training_steps=1"]
    metrics, trainer = toy_run(toy, tmp_path, *estimator("gae"), *changes)
    after = weights(trainer)
    assert all(torch.equal(after[key], start[key]) for key in after)
    assert "actor/pg_loss" not in metrics[0]
    assert metrics[0]["critic/grad_norm"] > 0


def test_epochs_and_mini_batches_make_optimizer_steps_and_later_ones_have_another_ratio(
    toy, tmp_path
):
    metrics, _ = run(toy, tmp_path, "ppo with two epochs and mini-batches")
    assert metrics[0]["actor/num_optimizer_steps"] == 4
    assert metrics[0]["actor/ppo_kl"] != 0.0, "the policy has moved since the batch was sampled"


def test_an_adaptive_kl_coefficient_moves_and_a_fixed_one_does_not(toy, tmp_path):
    adaptive, _ = run(toy, tmp_path, "ppo with an adaptive KL", "algorithm.kl_ctrl.horizon=50")
    fixed, _ = run(toy, tmp_path, "ppo with KL in the reward")
    key = "actor/reward_kl_penalty_coeff"
    assert adaptive[0][key] != adaptive[1][key]
    assert fixed[0][key] == fixed[1][key] == 0.001


def test_a_reference_exists_exactly_when_some_kl_needs_it(toy, tmp_path):
    _, without = run(toy, tmp_path, "opo")
    assert without.ref_policy_wg is None
    metrics, with_it = run(toy, tmp_path, "grpo")
    assert with_it.ref_policy_wg is with_it.actor_rollout_wg
    assert metrics[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[0]["actor/kl_coef"] == pytest.approx(0.001)


def test_dynamic_sampling_trains_only_on_prompts_whose_responses_differ(toy, tmp_path):
    metrics, trainer = run(toy, tmp_path, "dapo")
    batch = trainer.batch
    accuracies = {}
    for uid, accuracy in zip(
        batch.non_tensor_batch["uid"], batch.non_tensor_batch["acc"], strict=True
    ):
        accuracies.setdefault(uid, set()).add(accuracy)
    assert len(accuracies) == 4
    assert all(len(distinct) > 1 for distinct in accuracies.values())
    assert metrics[-1]["train/num_gen_batches"] >= 1
    assert trainer.train_dataloader.batch_size == 8


def test_dynamic_sampling_gives_up_at_its_limit(toy, tmp_path):
    (tmp_path / "dull.py").write_text("def compute_score(**kwargs): return 1.0\n")
    dull = [
        f"custom_reward_function.path={tmp_path / 'dull.py'}",
        "algorithm.filter_groups.max_num_gen_batches=2",
    ]
    with pytest.raises(TooFewGroups, match="2 generation batches gave 0 of 4 prompts"):
        toy_run(toy, tmp_path, *SMALL, *estimator("grpo", *FILTER), *dull)


def test_dynamic_sampling_stops_when_the_data_is_used_up(toy, tmp_path):
    (tmp_path / "dull.py").write_text("def compute_score(**kwargs): return 1.0\n")
    changes = [
        "trainer.total_training_steps=null",
        f"custom_reward_function.path={tmp_path}/dull.py",
    ]
    metrics, trainer = toy_run(toy, tmp_path, *SMALL, *estimator("grpo", *FILTER), *changes)
    assert metrics == []
    assert trainer.global_steps == 0


def test_the_overlong_penalty_reaches_the_reward(toy, tmp_path):
    metrics, trainer = run(toy, tmp_path, "dapo")
    long = trainer.batch.non_tensor_batch["overlong"].tolist()
    assert any(long)
    assert metrics[-1]["critic/score/min"] < 0


def test_remax_compares_with_the_greedy_response(toy, tmp_path):
    _, trainer = run(toy, tmp_path, "remax")
    batch = trainer.batch
    assert set(batch.batch["reward_baselines"].tolist()) == {0.0, 1.0}
    baseline = batch.batch["reward_baselines"][:, None] * batch.batch["response_mask"]
    returns = batch.batch["returns"]
    torch.testing.assert_close(batch.batch["advantages"], returns - baseline)


def test_validation_refuses_what_this_trainer_cannot_do(toy, tmp_path):
    changes = ["algorithm.filter_groups.enable=true", "algorithm.use_kl_in_reward=true"]
    with pytest.raises(ValueError, match="charged after prompts are chosen"):
        toy_run(toy, tmp_path, *changes, "algorithm.filter_groups.metric=seq_final_reward")
