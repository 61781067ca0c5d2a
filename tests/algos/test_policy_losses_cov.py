from dataclasses import replace

import pytest
import torch

from tests.algos.loss_cases import CASES, Batch, actor, gradient_of, loss_of, prepared, random_batch
from verl.algos.policy_losses import prepare_loss, prepared_by
from verl.algos.policy_losses.cov import token_covariance, token_lots
from verl.algos.registry import get_policy_loss_fn
from verl.config.actor import ActorConfig, PolicyLossConfig


def four_tokens(shift: float = 0.0) -> Batch:
    """Covariances 3, 0, 1 and 0 with the current log-probs; `shift` is log r of each token."""
    log_prob = torch.tensor([[-1.0, -2.0, -3.0, -2.0, 7.0]], dtype=torch.float64)
    return Batch(
        old_log_prob=log_prob - shift,
        log_prob=log_prob,
        advantages=torch.tensor([[3.0, 0.0, -1.0, -2.0, 7.0]], dtype=torch.float64),
        response_mask=torch.tensor([[1, 1, 1, 1, 0]]),
    )


def cov_actor(case: str, **options: float) -> ActorConfig:
    mode, _, _ = CASES[case]
    return ActorConfig(policy_loss=PolicyLossConfig(loss_mode=mode, **options))


def test_covariance_is_the_product_of_deviations_from_the_masked_means():
    batch = four_tokens()
    covariance = token_covariance(batch.log_prob, batch.advantages, batch.response_mask)
    assert covariance.tolist() == [[3.0, 0.0, 1.0, 0.0, 0.0]]


def test_a_single_token_has_nothing_to_vary_with():
    batch = four_tokens()
    alone = torch.tensor([[0, 0, 1, 0, 0]])
    assert not token_covariance(batch.log_prob, batch.advantages, alone).any()


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("clip_cov", {"clip_cov_ratio": 0.125, "clip_cov_lb": -1.0, "clip_cov_ub": 1.0}),
        ("kl_cov", {"kl_cov_ratio": 0.125}),
    ],
)
def test_among_equals_each_sequence_draws_lots_of_its_own(case, options):
    log_prob = -torch.rand(32, 8, dtype=torch.float64)
    batch = Batch(
        old_log_prob=log_prob,
        log_prob=log_prob,
        advantages=torch.zeros(32, 8, dtype=torch.float64),
        response_mask=torch.ones(32, 8, dtype=torch.long),
    )
    config = cov_actor(case, **options)
    columns = prepare_loss(get_policy_loss_fn(case), **vars(batch), config=config)
    selected = columns["selected_tokens"]
    assert selected.sum() == 32
    assert (selected.sum(0) > 0).sum() > 4, "not the same places in all sequences"


def test_clip_cov_drops_the_gradient_of_tokens_within_the_bounds_only():
    config = cov_actor("clip_cov", clip_cov_ratio=1.0, clip_cov_lb=0.5, clip_cov_ub=2.0)
    loss, metrics = loss_of(four_tokens(), config)
    assert loss.item() == pytest.approx((-3.0 + 0.0 + 0.0 + 2.0) / 4)  # token 2 would add 1
    expected = torch.tensor([[-3.0, 0.0, 0.0, 2.0, 0.0]], dtype=torch.float64) / 4
    torch.testing.assert_close(gradient_of(four_tokens(), config), expected)
    assert metrics["actor/pg_clipfrac"] == 0.25


def test_clip_cov_does_not_spend_its_share_on_tokens_that_are_clipped_anyway():
    # r = e on every token: the clip already holds token 0 (A > 0), not token 2 (A < 0)
    config = cov_actor("clip_cov", clip_cov_ratio=1.0, clip_cov_lb=0.5, clip_cov_ub=5.0)
    batch = four_tokens(shift=1.0)
    columns = prepare_loss(get_policy_loss_fn("clip_cov"), **vars(batch), config=config)
    assert columns["selected_tokens"].tolist() == [[False, False, True, False, False]]


def test_kl_cov_penalises_the_tokens_of_largest_covariance():
    config = cov_actor("kl_cov", kl_cov_ratio=0.25, ppo_kl_coef=0.1)
    loss, metrics = loss_of(four_tokens(shift=0.5), config)
    ratio = torch.tensor(0.5, dtype=torch.float64).exp().item()
    assert loss.item() == pytest.approx(((-3.0 + 1.0 + 2.0) * ratio + 0.1 * 0.5) / 4)
    assert metrics == {"actor/ppo_kl": pytest.approx(0.5)}
    gradient = gradient_of(four_tokens(shift=0.5), config)
    expected = torch.tensor([[-3.0 * ratio + 0.1, 0.0, ratio, 2 * ratio, 0.0]]).double() / 4
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-7)


def test_at_least_one_token_is_selected():
    for case in ("clip_cov", "kl_cov"):
        config = cov_actor(case, **{f"{case}_ratio": 0.0})
        batch = random_batch(num_rows=20, num_tokens=20)
        if case == "clip_cov":
            config = cov_actor(case, clip_cov_ratio=0.0, clip_cov_lb=0.0)
        assert prepared(batch, config)["selected_tokens"].sum() == 1


def test_the_share_counts_the_tokens_of_the_whole_batch():
    batch = random_batch(num_rows=40, num_tokens=25)
    num_tokens = batch.response_mask.sum().item()
    selected = prepared(batch, cov_actor("kl_cov", kl_cov_ratio=0.1))["selected_tokens"]
    assert selected.sum() == int(0.1 * num_tokens)
    assert not (selected & ~batch.response_mask.bool()).any()
    covariance = token_covariance(batch.old_log_prob, batch.advantages, batch.response_mask)
    others = batch.response_mask.bool() & ~selected
    assert covariance[selected].min() >= covariance[others].max()


def test_the_draw_of_clip_cov_is_the_same_for_the_same_batch_in_any_order_and_padding():
    batch = random_batch(num_rows=30, num_tokens=12)
    config = cov_actor("clip_cov", clip_cov_ratio=0.1, clip_cov_lb=0.0)
    selected = prepared(batch, config)["selected_tokens"]
    assert 0 < selected.sum() < (token_covariance(*covariance_inputs(batch)) > 0).sum()
    torch.manual_seed(99)
    assert torch.equal(prepared(batch, config)["selected_tokens"], selected)
    order = torch.randperm(30)
    assert torch.equal(prepared(batch.rows(order), config)["selected_tokens"], selected[order])
    wide = Batch(*(torch.nn.functional.pad(column, (0, 5)) for column in vars(batch).values()))
    assert torch.equal(prepared(wide, config)["selected_tokens"][:, :12], selected)


def covariance_inputs(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return batch.old_log_prob, batch.advantages, batch.response_mask


def test_lots_are_spread_evenly_and_differ_between_batches():
    log_prob = -torch.rand(200, 50)
    mask = torch.ones(200, 50)
    lots = token_lots(log_prob, mask)
    assert lots.unique().numel() == lots.numel()
    assert abs((lots > 0).double().mean().item() - 0.5) < 0.02
    assert abs((lots[:, 0] > lots[:, 1]).double().mean().item() - 0.5) < 0.15
    other = token_lots(log_prob * 0.999, mask)
    agreement = ((lots > 0) == (other > 0)).double().mean().item()
    assert abs(agreement - 0.5) < 0.02


def test_lots_tell_apart_places_and_sequences_but_not_copies_of_a_sequence():
    log_prob = torch.tensor([[-1.0, -2.0, -2.0], [-1.0, -2.0, -2.0], [-2.0, -1.0, -2.0]])
    lots = token_lots(log_prob, torch.ones(3, 3))
    assert torch.equal(lots[0], lots[1])
    assert lots[[0, 2]].unique().numel() == 6


@pytest.mark.parametrize("case", ["clip_cov", "kl_cov"])
def test_a_direct_call_selects_among_its_own_rows_with_the_current_log_probs(case: str):
    batch = random_batch(drift=0.3)
    config = actor(case)
    columns = prepare_loss(get_policy_loss_fn(case), **vars(batch), config=config)
    loss, _ = loss_of(batch, config)
    assert loss.item() == loss_of(batch, config, **columns)[0].item()


@pytest.mark.parametrize("case", ["clip_cov", "kl_cov"])
def test_the_old_log_probs_make_the_same_selection_while_the_policy_has_not_moved(case: str):
    batch = random_batch()
    batch = replace(batch, log_prob=batch.old_log_prob)
    config = actor(case)
    current = prepare_loss(get_policy_loss_fn(case), **vars(batch), config=config)
    assert current["selected_tokens"].any()
    assert torch.equal(prepared(batch, config)["selected_tokens"], current["selected_tokens"])


@pytest.mark.parametrize("case", ["clip_cov", "kl_cov"])
def test_a_batch_without_tokens_or_rows_selects_nothing(case: str):
    batch = random_batch()
    empty = replace(batch, response_mask=torch.zeros_like(batch.response_mask))
    assert not prepared(empty, actor(case))["selected_tokens"].any()
    assert prepared(batch.rows([]), actor(case))["selected_tokens"].shape == (0, 6)


def test_losses_that_look_at_tokens_one_by_one_need_no_preparation():
    for case in set(CASES) - {"clip_cov", "kl_cov", "bypass clip_cov"}:
        assert prepared(random_batch(), actor(case)) == {}


def test_a_preparation_belongs_to_the_function_and_not_to_its_name():
    def prepare(advantages: torch.Tensor, **others: object) -> dict[str, torch.Tensor]:
        return {"largest": advantages.abs().amax().expand(len(advantages))}

    @prepared_by(prepare)
    def loss_fn() -> None: ...

    batch = random_batch()
    columns = prepare_loss(loss_fn, **vars(batch), config=actor())
    assert columns["largest"].tolist() == [batch.advantages.abs().max().item()] * 9
    assert prepare_loss(print, **vars(batch), config=actor()) == {}
