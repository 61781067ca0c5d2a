"""The policy update through a whole model: exact on-policy, independent of micro-batches."""

import pytest
import torch
from tensordict import TensorDict

from tests.tiny_models import VOCABULARY, plain_twin, tiny_model
from verl.algos.sessions import SESSION_INDEX, SESSION_TOKENS
from verl.config.actor import FSDPActorConfig, PolicyLossConfig
from verl.config.algorithm import RolloutCorrectionConfig
from verl.config.critic import FSDPCriticConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.critic.dp_critic import DataParallelPPOCritic
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.one_device import OneDeviceEngine

ROWS, PROMPT, RESPONSE = 8, 4, 6
ALL_ROWS = MicroBatching(rows=ROWS)


def batch():
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCABULARY, (ROWS, PROMPT + RESPONSE), generator=generator)
    lengths = torch.tensor([6, 1, 3, 6, 0, 2, 5, 4])
    mask = torch.cat(
        [torch.ones(ROWS, PROMPT), torch.arange(RESPONSE) < lengths[:, None]], 1
    ).long()
    noise = 0.1 * torch.randn(2, ROWS, RESPONSE, generator=generator)
    return TensorDict(
        {
            "input_ids": ids * mask,
            "attention_mask": mask,
            "position_ids": torch.arange(PROMPT + RESPONSE).expand(ROWS, -1) * mask,
            "responses": (ids * mask)[:, PROMPT:],
            "response_mask": mask[:, PROMPT:],
            "advantages": torch.randn(ROWS, RESPONSE, generator=generator) * mask[:, PROMPT:],
            "ref_log_prob": -4 + noise[0],
            "returns": noise[1],
            "values": torch.zeros(ROWS, RESPONSE),
        },
        batch_size=ROWS,
    )


def actor(lr=0.01, optimizer="AdamW", **options):
    optim = FSDPOptimizerConfig(lr=lr, weight_decay=0.0, optimizer=optimizer)
    engine = OneDeviceEngine(lambda: tiny_model("llama"), optim, max_grad_norm=1.0)
    engine.initialize()
    return DataParallelPPOActor(FSDPActorConfig(**options), engine)


def with_old_log_probs(built, data):
    columns = built.compute_log_prob(data, micro_batching=ALL_ROWS, temperature=1.0)
    return data.copy().update({"old_log_probs": columns["log_probs"]})


def update(built, data, **options):
    return built.update_policy(
        data, temperature=1.0, old_policy_version=built.engine.policy_version, **options
    )


LOSSES = ["vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo"]


@pytest.mark.parametrize("loss_mode", LOSSES)
def test_the_update_does_not_depend_on_micro_batches(loss_mode):
    results = []
    for cut in ({"ppo_micro_batch_size_per_gpu": n} for n in (8, 3, 1)):
        built = actor(
            policy_loss=PolicyLossConfig(loss_mode=loss_mode, clip_cov_ratio=0.2, kl_cov_ratio=0.2),
            use_kl_loss=True,
            kl_loss_coef=0.1,
            entropy_coeff=0.01,
            ppo_epochs=2,
            **cut,
        )
        metrics = update(built, with_old_log_probs(built, batch()), rows_per_step=4)
        results.append((metrics, list(built.engine.module.parameters())))
    metrics, weights = results[0]
    for other_metrics, other_weights in results[1:]:
        assert other_metrics == pytest.approx(metrics, rel=2e-3, abs=2e-5)
        for a, b in zip(weights, other_weights, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("loss_mode", ["gspo", "geo_mean", "bypass_mode"])
def test_ratios_of_sessions_do_not_depend_on_where_their_rows_are_computed(loss_mode):
    """Rows of a session in one pass or in several, after the policy has moved."""

    def updated(rows_per_pass, *, has_sessions=True):
        loss = PolicyLossConfig(loss_mode=loss_mode)
        loss.rollout_correction = RolloutCorrectionConfig.bypass_pg_is(1.5)
        built = actor(optimizer="SGD", policy_loss=loss, ppo_micro_batch_size_per_gpu=rows_per_pass)
        data = with_old_log_probs(built, batch())
        noise = torch.randn(ROWS, RESPONSE, generator=torch.Generator().manual_seed(1))
        data["old_log_probs"] += 0.2 * noise
        if has_sessions:
            data[SESSION_INDEX] = torch.arange(ROWS) // 2
            tokens = data["response_mask"].sum(-1).view(-1, 2).sum(-1)
            data[SESSION_TOKENS] = tokens.repeat_interleave(2)
        built.update_policy(data, rows_per_step=ROWS, temperature=1.0)
        return torch.cat([weight.flatten() for weight in built.engine.module.parameters()])

    whole, before = updated(8), torch.cat([w.flatten() for w in tiny_model("llama").parameters()])
    moved = (whole - before).abs().max()
    for rows_per_pass in (3, 1):
        assert (updated(rows_per_pass) - whole).abs().max() < 1e-4 * moved
    assert (updated(8, has_sessions=False) - whole).abs().max() > 1e-2 * moved


def test_cutting_by_tokens_gives_the_same_update_as_cutting_by_rows():
    by_rows, by_tokens = actor(), actor(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=16)
    for built in (by_rows, by_tokens):
        update(built, with_old_log_probs(built, batch()), rows_per_step=ROWS)
    for a, b in zip(*(x.engine.module.parameters() for x in (by_rows, by_tokens)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_on_the_first_update_the_ratio_is_exactly_one():
    built = actor()
    data = with_old_log_probs(built, batch())
    metrics = update(built, data, rows_per_step=ROWS)
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics["actor/pg_clipfrac"] == 0.0
    assert metrics["actor/old_log_prob_error"] < 1e-6
    mask, advantages = data["response_mask"], data["advantages"]
    expected = -(advantages * mask).sum() / mask.sum()  # the ratio is 1, so the loss is -A
    assert metrics["actor/pg_loss"] == pytest.approx(float(expected), rel=1e-5)


def test_sums_of_squared_probabilities_come_when_asked_for_and_match_the_softmax():
    data, two_rows = batch(), MicroBatching(rows=2)
    plain = actor().compute_log_prob(data, micro_batching=two_rows, temperature=0.7)
    assert "sum_pi_squared" not in plain
    built = actor(calculate_sum_pi_squared=True)
    found = built.compute_log_prob(data, micro_batching=two_rows, temperature=0.7)
    with torch.no_grad():
        row = data["input_ids"][:1]  # its response is full: no padding
        logits = plain_twin(built.engine.module)(input_ids=row).logits
    expected = (logits[0, PROMPT - 1 : -1] / 0.7).softmax(-1).square().sum(-1)
    torch.testing.assert_close(found["sum_pi_squared"][0], expected)


def test_the_second_mini_batch_sees_a_policy_that_has_moved():
    built = actor()
    metrics = update(built, with_old_log_probs(built, batch()), rows_per_step=4)
    assert metrics["actor/num_optimizer_steps"] == 2
    assert metrics["actor/ppo_kl"] != 0.0


def test_wrong_old_log_probs_are_noticed_on_the_first_update():
    built = actor()
    data = with_old_log_probs(built, batch())
    data["old_log_probs"] += 0.5 * data["response_mask"]
    assert update(built, data, rows_per_step=ROWS)["actor/old_log_prob_error"] == pytest.approx(0.5)


def test_old_log_probs_of_an_older_policy_are_used_as_they_are():
    built = actor()
    data = with_old_log_probs(built, batch())
    data["old_log_probs"] += 0.5 * data["response_mask"]
    metrics = built.update_policy(
        data, rows_per_step=ROWS, temperature=1.0, old_policy_version=None
    )
    assert metrics["actor/ppo_kl"] == pytest.approx(0.5, rel=1e-4)
    assert "actor/old_log_prob_error" not in metrics


def test_a_positive_advantage_makes_a_response_likelier_and_a_negative_one_less_likely():
    for sign in (1.0, -1.0):
        built = actor(lr=1e-3)
        data = with_old_log_probs(built, batch())
        data["advantages"] = sign * data["response_mask"].float()
        update(built, data, rows_per_step=ROWS)
        after = built.compute_log_prob(data, micro_batching=ALL_ROWS, temperature=1.0)["log_probs"]
        change = ((after - data["old_log_probs"]) * data["response_mask"]).sum()
        assert sign * change > 0


def test_a_shuffle_changes_the_mini_batches_and_repeats_itself():
    def weights(**options):
        built = actor(**options)
        update(built, with_old_log_probs(built, batch()), rows_per_step=2)
        return torch.cat([p.detach().flatten() for p in built.engine.module.parameters()])

    assert torch.equal(weights(shuffle=True), weights(shuffle=True))
    assert not torch.equal(weights(shuffle=True), weights())


@pytest.mark.gpu
def test_a_critic_on_a_gpu_takes_rows_in_cpu_memory(tmp_path):
    from tests.tiny_models import plain_twin
    from verl.models.loading import load_value_model

    plain_twin(tiny_model("llama")).save_pretrained(tmp_path)
    engine = OneDeviceEngine(
        lambda: load_value_model(str(tmp_path)).to("cuda"),
        FSDPOptimizerConfig(lr=0.02, weight_decay=0.0),
        is_value_model=True,
    )
    engine.initialize()
    critic = DataParallelPPOCritic(FSDPCriticConfig(cliprange_value=10.0), engine)
    critic.update_critic(batch(), rows_per_step=ROWS)
    values = critic.compute_values(batch())
    assert values.any()
    assert not values.cpu()[batch()["response_mask"] == 0].any()


def test_the_critic_learns_returns_and_counts_only_response_tokens(tmp_path):
    from tests.tiny_models import plain_twin
    from verl.models.loading import load_value_model

    plain_twin(tiny_model("llama")).save_pretrained(tmp_path)
    engine = OneDeviceEngine(
        lambda: load_value_model(str(tmp_path)),
        FSDPOptimizerConfig(lr=0.02, weight_decay=0.0),
        is_value_model=True,
    )
    engine.initialize()
    critic = DataParallelPPOCritic(FSDPCriticConfig(cliprange_value=10.0), engine)
    data = batch()
    mask = data["response_mask"]
    assert not critic.compute_values(data).any()
    first = critic.update_critic(data, rows_per_step=ROWS)
    expected = 0.5 * (data["returns"].square() * mask).sum() / mask.sum()  # values are still 0
    assert first["critic/vf_loss"] == pytest.approx(float(expected), rel=1e-5)
    for _ in range(30):
        last = critic.update_critic(data, rows_per_step=ROWS)
    assert last["critic/vf_loss"] < 0.5 * first["critic/vf_loss"]
    assert not critic.compute_values(data)[~mask.bool()].any()
