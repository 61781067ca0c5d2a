from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algos.loss_cases import CASES, Batch, actor, gradient_of, loss_of, random_batch
from verl.algos.aggregate import LOSS_AGG_MODES

cases = st.sampled_from(sorted(CASES))
modes = st.sampled_from(LOSS_AGG_MODES)
seeds = st.integers(0, 10_000)
quick = settings(max_examples=60, deadline=None, derandomize=True)


def config_of(case: str):
    return actor(case, loss_scale_factor=7)


@quick
@given(case=cases, mode=modes, seed=seeds, shuffle=st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(case, mode, seed, shuffle):
    batch = random_batch(seed=seed)
    order = list(range(9))
    shuffle.shuffle(order)
    gradient = gradient_of(batch, config_of(case), mode)
    shuffled = gradient_of(batch.rows(order), config_of(case), mode)
    torch.testing.assert_close(shuffled, gradient[order], rtol=0, atol=1e-12)


@quick
@given(case=cases, mode=modes, seed=seeds, width=st.integers(1, 5))
def test_padding_columns_have_no_influence_whatever_they_hold(case, mode, seed, width):
    batch = random_batch(seed=seed)
    garbage = {"old_log_prob": float("inf"), "log_prob": float("nan"), "advantages": 3.0}
    columns = {
        name: torch.nn.functional.pad(column, (0, width), value=garbage.get(name, 0))
        for name, column in vars(batch).items()
    }
    gradient = gradient_of(batch, config_of(case), mode)
    padded = gradient_of(Batch(**columns), config_of(case), mode)
    torch.testing.assert_close(padded[:, :6], gradient, rtol=0, atol=1e-12)
    assert (padded[:, 6:] == 0).all()


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("case", CASES)
def test_a_batch_without_tokens_has_loss_and_gradient_zero(case: str, mode: str):
    full = random_batch()
    batch = replace(full, response_mask=torch.zeros_like(full.response_mask))
    loss, metrics = loss_of(batch, config_of(case), mode)
    assert metrics.keys() == loss_of(full, config_of(case), mode)[1].keys(), "ranks must agree"
    assert loss.item() == 0
    assert (gradient_of(batch, config_of(case), mode) == 0).all()
    assert set(map(float, metrics.values())) <= {0.0}


@quick
@given(case=cases, mode=modes, seed=seeds)
def test_masked_positions_get_no_gradient(case, mode, seed):
    batch = random_batch(seed=seed)
    gradient = gradient_of(batch, config_of(case), mode)
    assert (gradient[batch.response_mask == 0] == 0).all()


@quick
@given(
    case=cases,
    mode=modes,
    seed=seeds,
    drift=st.sampled_from([30.0, 1e3, 1e6]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_extreme_ratios_stay_finite_in_value_and_gradient(case, mode, seed, drift, dtype):
    batch = random_batch(seed=seed, drift=drift)
    batch = Batch(
        batch.old_log_prob.to(dtype),
        batch.log_prob.to(dtype),
        batch.advantages.to(dtype),
        batch.response_mask,
    )
    loss, metrics = loss_of(batch, config_of(case), mode)
    assert loss.isfinite()
    assert gradient_of(batch, config_of(case), mode).isfinite().all()
    assert torch.tensor(list(metrics.values())).isfinite().all()


@quick
@given(case=cases.filter(lambda case: case not in ("kl_cov", "dro")), mode=modes, seed=seeds)
def test_without_advantages_there_is_no_gradient(case, mode, seed):
    batch = random_batch(seed=seed)
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    assert (gradient_of(batch, config_of(case), mode) == 0).all()


def test_without_advantages_kl_cov_only_pulls_selected_tokens_to_the_old_policy():
    batch = random_batch()
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    gradient = gradient_of(batch, config_of("kl_cov"))
    pulled = gradient != 0
    assert pulled.sum() == int(0.15 * batch.response_mask.sum())
    assert (gradient[pulled].sign() == (batch.log_prob - batch.old_log_prob)[pulled].sign()).all()


@quick
@given(case=cases, seed=seeds)
def test_metrics_are_means_over_tokens(case, seed):
    """So the metric of a whole is the average of its parts, weighted by tokens."""
    batch = random_batch(seed=seed)
    metrics = loss_of(batch, config_of(case))[1]
    whole = {name: float(v) for name, v in metrics.items() if name.startswith("actor/")}
    if case.endswith("clip_cov"):
        whole.pop("actor/pg_clipfrac")  # each part would make a selection of its own
    total = batch.response_mask.sum().item()
    sums = dict.fromkeys(whole, 0.0)
    for rows in ([0, 1, 2], [3], [4, 5, 6, 7, 8]):
        part = batch.rows(rows)
        _, metrics = loss_of(part, config_of(case))
        for name in sums:
            sums[name] += float(metrics[name]) * part.response_mask.sum().item()
    assert {name: value / total for name, value in sums.items()} == pytest.approx(whole, abs=1e-6)
