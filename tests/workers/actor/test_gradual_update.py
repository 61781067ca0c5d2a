"""Rows that come bit by bit make the update that the whole batch makes."""

import pytest
import torch

from tests.workers.actor.test_dp_actor import (
    RESPONSE,
    ROWS,
    actor,
    batch,
    update,
    with_old_log_probs,
)
from verl.algos.aggregate import LOSS_AGG_MODES
from verl.config.actor import PolicyLossConfig
from verl.workers.actor.gradual_update import GradualUpdate

TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01, "lr": 0.01}


def gradual(built):
    return GradualUpdate(built, num_rows=ROWS, num_columns=RESPONSE, temperature=1.0)


def update_by_groups(built, data, order=((4, 5), (0, 1), (6, 7), (2, 3))):
    """Groups in the order in which they end."""
    step = gradual(built)
    for group in order:
        step.add(data[list(group)])
    return step.finish()


def assert_same_update(ordinary, bit_by_bit, *, rel=1e-6):
    (metrics, one), (other_metrics, other) = ordinary, bit_by_bit
    assert set(other_metrics) == set(metrics)
    assert other_metrics == pytest.approx(metrics, rel=rel, abs=1e-6)
    for a, b in zip(one.engine.module.parameters(), other.engine.module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def both(data=None, kept=None, **options):
    """The ordinary update and the one by groups, from the same start. SGD: weights tell gradients.

    Adam divides the gradient by its own size, which would hide a wrong factor.
    """
    results = []
    for is_gradual in (False, True):
        built = actor(optimizer="SGD", **options)
        rows = with_old_log_probs(built, batch() if data is None else data)
        if is_gradual:
            metrics = update_by_groups(built, rows, *([kept] if kept else []))
        else:
            whole = rows if kept is None else rows[sorted(row for group in kept for row in group)]
            metrics = update(built, whole, rows_per_step=ROWS)
        results.append((metrics, built))
    return results


@pytest.mark.parametrize("cut", [{"ppo_micro_batch_size_per_gpu": 3}, {"use_dynamic_bsz": True}])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_gradient_losses_and_weights_are_those_of_the_ordinary_update(mode, cut):
    if "use_dynamic_bsz" in cut:
        cut = {**cut, "ppo_max_token_len_per_gpu": 18}
    ordinary, bit_by_bit = both(loss_agg_mode=mode, **TERMS, **cut)
    assert_same_update(ordinary, bit_by_bit)
    assert {"actor/pg_loss", "actor/kl_loss", "actor/grad_norm"} <= set(ordinary[0])


@pytest.mark.parametrize("loss_mode", ["gpg", "cispo", "gspo", "sapo", "geo_mean"])
def test_other_losses_give_the_same_update_too(loss_mode):
    mode = "token-mean" if loss_mode in ("gpg", "cispo") else "seq-mean-token-mean"
    loss = PolicyLossConfig(loss_mode=loss_mode)
    assert_same_update(*both(policy_loss=loss, loss_agg_mode=mode, **TERMS))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_rows_that_never_come_are_not_counted(mode):
    kept = ((6, 7), (0, 1))
    assert_same_update(*both(kept=kept, loss_agg_mode=mode, **TERMS))


def test_a_micro_batch_runs_as_soon_as_it_is_full():
    built = actor(ppo_micro_batch_size_per_gpu=4)
    rows = with_old_log_probs(built, batch())
    step = gradual(built)
    counts = []
    for start in (0, 3, 5):
        step.add(rows[start : start + (3 if start == 0 else 2)])
        counts.append(step.num_rows_run)
    assert counts == [0, 4, 4]
    before = [p.detach().clone() for p in built.engine.module.parameters()]
    step.add(rows[7:])
    assert step.num_rows_run == 8
    now = list(built.engine.module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True)), "no step yet"
    step.finish()
    assert not all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    assert built.engine.policy_version == 1


def test_passes_by_tokens_stay_within_the_budget_and_keep_groups_together():
    built = actor(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=20)
    rows = with_old_log_probs(built, batch())
    sizes = []
    add = built.engine.add_to_step

    def counted(data, *arguments, **options):
        sizes.append(int(data["attention_mask"].sum()))
        add(data, *arguments, **options)

    built.engine.add_to_step = counted
    update_by_groups(built, rows)
    assert sum(sizes) == int(rows["attention_mask"].sum())
    assert max(sizes) <= 20


def test_an_update_that_was_given_up_leaves_nothing_behind():
    ordinary = both(**TERMS)[0]
    built = actor(optimizer="SGD", **TERMS)
    rows = with_old_log_probs(built, batch())
    for group in ((0, 1, 2, 3), (4, 5, 6, 7)):
        gradual(built).add(rows[list(group)])  # never finished
    assert_same_update(ordinary, (update_by_groups(built, rows), built))


def test_an_engine_takes_rows_into_an_open_step_only():
    built = actor()
    with pytest.raises(ValueError, match="no step is open"):
        built.engine.finish_step()
