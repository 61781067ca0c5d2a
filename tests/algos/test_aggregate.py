"""Loss aggregation: golden values, and the same gradient however the batch is cut."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algos.aggregate import LOSS_AGG_MODES, agg_loss, compute_entropy_loss, compute_value_loss

# Kept: 1, 2, 3 in the first row, 4 in the second, nothing in the third. 9 stands for padding.
LOSS = torch.tensor([[1.0, 2.0, 3.0, 9.0], [4.0, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])

every_mode = pytest.mark.parametrize("mode", LOSS_AGG_MODES)


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("token-mean", 10 / 4),
        ("seq-mean-token-sum", (6 + 4) / 2),
        ("seq-mean-token-mean", (2 + 4) / 2),
        ("seq-mean-token-sum-norm", 10 / 4),  # 4 columns
        ("token-sum", 10),
    ],
)
def test_values_worked_by_hand(mode, value):
    assert agg_loss(LOSS, MASK, mode).item() == pytest.approx(value)


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("token-mean", 10 / 40 * 2),
        ("seq-mean-token-sum", 10 / 5 * 2),
        ("seq-mean-token-mean", 6 / 5 * 2),
        ("seq-mean-token-sum-norm", 10 / 100 * 2),
        ("token-sum", 10 * 2),
    ],
)
def test_global_counts_and_ranks_worked_by_hand(mode, value):
    whole = {"batch_num_tokens": 40, "global_batch_size": 5, "loss_scale_factor": 100}
    assert agg_loss(LOSS, MASK, mode, dp_size=2, **whole).item() == pytest.approx(value)


def test_the_modes_differ_in_how_they_weigh_long_sequences():
    weights = {}
    for mode in LOSS_AGG_MODES:
        loss = LOSS.clone().requires_grad_(True)
        agg_loss(loss, MASK, mode).backward()
        weights[mode] = (loss.grad[0, 0] / loss.grad[1, 0]).item()
    assert weights["token-mean"] == 1
    assert weights["seq-mean-token-sum"] == 1
    assert weights["seq-mean-token-sum-norm"] == 1
    assert weights["seq-mean-token-mean"] == pytest.approx(1 / 3)


@every_mode
def test_an_empty_mask_gives_zero_with_a_zero_gradient(mode):
    loss = torch.randn(2, 3, requires_grad=True)
    value = agg_loss(loss, torch.zeros(2, 3), mode)
    value.backward()
    assert value.item() == 0
    assert not loss.grad.any()


@every_mode
def test_an_empty_piece_of_a_batch_and_an_empty_batch_give_zero(mode):
    whole = {"dp_size": 2, "batch_num_tokens": 8, "global_batch_size": 4, "loss_scale_factor": 5}
    assert agg_loss(LOSS, MASK * 0, mode, **whole).item() == 0
    nothing = {"batch_num_tokens": torch.tensor(0), "global_batch_size": torch.tensor(0)}
    assert agg_loss(LOSS, MASK * 0, mode, **nothing).item() == 0


@every_mode
def test_what_stands_outside_the_mask_has_no_influence(mode):
    loss = torch.where(MASK.bool(), LOSS, float("nan")).requires_grad_(True)
    value = agg_loss(loss, MASK, mode)
    value.backward()
    assert value.item() == agg_loss(LOSS, MASK, mode).item()
    assert torch.isfinite(loss.grad).all()


@every_mode
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
def test_the_type_of_the_mask_does_not_matter(mode, dtype):
    assert agg_loss(LOSS, MASK.to(dtype), mode).item() == agg_loss(LOSS, MASK, mode).item()


@every_mode
def test_more_padding_changes_nothing_once_the_scale_is_given(mode):
    pad = torch.nn.functional.pad
    padded = agg_loss(pad(LOSS, (0, 3)), pad(MASK, (0, 3)), mode, loss_scale_factor=4)
    assert padded.item() == agg_loss(LOSS, MASK, mode).item()


@every_mode
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(mode, data):
    """Micro-batches add up, ranks are averaged: any cut gives the gradient of the whole batch."""
    B, T = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))
    bits = data.draw(st.lists(st.integers(0, 1), min_size=B * T, max_size=B * T))
    mask = torch.tensor(bits).view(B, T)
    dp_size = data.draw(st.integers(1, 3))
    place = st.tuples(st.integers(0, dp_size - 1), st.integers(0, 2))  # (rank, micro-batch)
    places = data.draw(st.lists(place, min_size=B, max_size=B))
    values = torch.arange(B * T, dtype=torch.float64).view(B, T) / 3 - 1

    whole = values.clone().requires_grad_(True)
    loss_of_whole = agg_loss(whole, mask, mode)
    loss_of_whole.backward()

    counts = {
        "dp_size": dp_size,
        "batch_num_tokens": int(mask.sum()),
        "global_batch_size": int((mask.sum(-1) > 0).sum()),
        "loss_scale_factor": T,
    }
    pieces = values.clone().requires_grad_(True)
    losses = []
    for place in sorted(set(places)):
        rows = [row for row in range(B) if places[row] == place]
        loss = agg_loss(pieces[rows], mask[rows], mode, **counts)
        (loss / dp_size).backward()  # the data-parallel mean over ranks
        losses.append(loss.item() / dp_size)
    assert sum(losses) == pytest.approx(loss_of_whole.item())
    torch.testing.assert_close(pieces.grad, whole.grad)


def test_several_ranks_need_the_global_count():
    for mode, name in [
        ("token-mean", "batch_num_tokens"),
        ("seq-mean-token-sum", "global_batch_size"),
    ]:
        with pytest.raises(ValueError, match=f"dp_size=4 needs {name}"):
            agg_loss(LOSS, MASK, mode, dp_size=4)


def test_an_unknown_mode_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"'mean'.*token-mean, seq-mean-token-sum"):
        agg_loss(LOSS, MASK, "mean")


def test_a_uniform_policy_over_four_tokens_has_entropy_log_four():
    loss = compute_entropy_loss(torch.zeros(2, 3, 4), torch.ones(2, 3))
    assert loss.item() == pytest.approx(math.log(4))


def test_only_kept_tokens_count_and_the_mode_decides_how():
    logits = torch.zeros(2, 2, 2)
    logits[0, 1] = torch.tensor([0.0, -1e9])  # certain: entropy 0
    mask = torch.tensor([[1, 1], [1, 0]])
    log_2 = math.log(2)
    assert compute_entropy_loss(logits, mask).item() == pytest.approx(2 * log_2 / 3)
    by_sequence = compute_entropy_loss(logits, mask, "seq-mean-token-mean")
    assert by_sequence.item() == pytest.approx((log_2 / 2 + log_2) / 2)
    of_a_part = compute_entropy_loss(logits, mask, "token-mean", dp_size=2, batch_num_tokens=10)
    assert of_a_part.item() == pytest.approx(2 * log_2 / 10 * 2)


def test_ascending_the_entropy_flattens_the_policy():
    logits = torch.tensor([[[1.0, 0.0]]], requires_grad=True)
    compute_entropy_loss(logits, torch.ones(1, 1)).backward()
    assert logits.grad[0, 0, 0] < 0 < logits.grad[0, 0, 1]


def test_the_step_is_clipped_around_the_old_values():
    vpreds = torch.tensor([[1.0, 0.2, 0.0]], requires_grad=True)
    returns = torch.tensor([[2.0, 1.0, -1.0]])
    values = torch.tensor([[0.0, 0.0, 0.0]])  # before the update
    loss, clipfrac = compute_value_loss(vpreds, returns, values, torch.ones(1, 3), 0.5)
    # Token 1: v = 1 is clipped to 0.5, (0.5 - 2)^2 = 2.25 > (1 - 2)^2 = 1.
    # Tokens 2 and 3 are within reach: 0.64 and 1.
    assert loss.item() == pytest.approx(0.5 * (2.25 + 0.64 + 1.0) / 3)
    assert clipfrac.item() == pytest.approx(1 / 3)
    loss.backward()
    # A clipped token does not pull any further; the others by (v - R) / 3.
    assert vpreds.grad[0].tolist() == pytest.approx([0.0, -0.8 / 3, 1.0 / 3])


def test_the_clip_does_not_help_a_prediction_that_went_the_wrong_way():
    # v moved from 0 to -1 while the return is 1: the unclipped error is larger, so it counts.
    vpreds = torch.tensor([[-1.0]], requires_grad=True)
    loss, clipfrac = compute_value_loss(
        vpreds, torch.tensor([[1.0]]), torch.tensor([[0.0]]), torch.ones(1, 1), 0.5
    )
    assert loss.item() == pytest.approx(0.5 * 4.0)
    assert clipfrac.item() == 0.0
    loss.backward()
    assert vpreds.grad.item() == pytest.approx(-2.0)


def test_moving_both_values_and_old_values_keeps_the_clip():
    args = torch.tensor([[3.0]]), torch.tensor([[5.0]])
    near, _ = compute_value_loss(
        *args, values=torch.tensor([[3.2]]), response_mask=torch.ones(1, 1), cliprange_value=0.5
    )
    far, _ = compute_value_loss(
        *args, values=torch.tensor([[0.0]]), response_mask=torch.ones(1, 1), cliprange_value=0.5
    )
    assert near.item() == pytest.approx(2.0)
    assert far.item() == pytest.approx(0.5 * 4.5**2)


def test_masked_tokens_count_neither_in_the_loss_nor_in_the_fraction():
    vpreds = torch.tensor([[1.0, float("nan")], [50.0, 0.0]])
    mask = torch.tensor([[1, 0], [0, 0]])
    loss, clipfrac = compute_value_loss(vpreds, torch.zeros(2, 2), torch.zeros(2, 2), mask, 2.0)
    assert loss.item() == pytest.approx(0.5)
    assert clipfrac.item() == 0.0


def test_global_counts_reach_the_aggregation():
    ones = torch.ones(2, 2)
    loss, _ = compute_value_loss(
        ones, ones * 0, ones, ones, 0.5, "token-mean", dp_size=2, batch_num_tokens=16
    )
    assert loss.item() == pytest.approx(0.5 * 4 / 16 * 2)
    by_sequence, _ = compute_value_loss(ones, ones * 0, ones, ones, 0.5, "seq-mean-token-sum")
    assert by_sequence.item() == pytest.approx(0.5 * 2)
