"""The filter kernels let through what a sort lets through, and rows do not feel each other."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.models.kernels.devices import on_each_device, on_each_dtype
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.native.rows import RowSettings
from verl.workers.rollout.native.sampler import Needs, next_tokens

MIXTURE = [
    {},
    {"top_k": 1},
    {"top_k": 5, "temperature": 0.7},
    {"top_k": 100_000},
    {"top_p": 0.9},
    {"top_p": 0.3, "top_k": 20},
    {"top_p": 1e-9},
    {"min_p": 0.1, "temperature": 1.5},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "top_p": 0.5, "temperature": 0.7},
    {"repetition_penalty": 2.0, "top_p": 0.5, "temperature": 0.0},
    {"top_p": 0.95, "min_p": 0.02, "top_k": 30},
]


def rows_of(combinations, device):
    params = [SamplingParams(**combination) for combination in combinations]
    seeds = [7919 * i - (i % 3) * 2**61 for i in range(len(params))]
    return params, RowSettings.of(params, seeds, torch.device(device))


def draw(logits, rows, *, seen=None, filters=True, first_index=0, **scoring):
    from verl.models.kernels.filters import Filters, Repetition
    from verl.models.kernels.sampling import draw_tokens

    return draw_tokens(
        logits,
        rows.temperature,
        rows.is_greedy,
        rows.seed,
        first_index + torch.arange(len(logits), device=logits.device),
        filters=Filters(rows.top_k, rows.top_p, rows.min_p) if filters else None,
        repetition=None if seen is None else Repetition(rows.repetition_penalty, seen),
        renormalizes=rows.renormalizes if filters else None,
        **scoring,
    )


def floors(logits, combinations):
    """The smallest weight that passes, row by row."""
    from verl.models.kernels.filters import Filters, Scores, smallest_weights
    from verl.models.kernels.log_probs import block_statistics

    _, rows = rows_of(combinations, logits.device)
    maxima, denominators = block_statistics(logits, rows.temperature, scale=1.0, softcap=None)
    return smallest_weights(
        Scores(logits, rows.temperature, 1.0, None, None),
        Filters(rows.top_k, rows.top_p, rows.min_p),
        rows.is_greedy,
        maxima,
        denominators,
    ).tolist()


@pytest.fixture
def small_blocks(monkeypatch):
    """300 tokens are three blocks for the statistics and five for the search."""
    from verl.models.kernels import filters, log_probs, sampling

    for module in (filters, log_probs, sampling):
        monkeypatch.setattr(module, "BLOCK", 128)
    monkeypatch.setattr(filters, "SEARCH_BLOCK", 64)


@on_each_device
@pytest.mark.parametrize(
    ("combination", "smallest"),
    [
        ({"top_k": 1}, 1.0),
        ({"top_k": 2}, 0.5),  # two tokens are as likely: both pass
        ({"top_k": 3}, 0.5),
        ({"top_k": 4}, 0.0),  # all there are
        ({"top_p": 1e-9}, 1.0),
        ({"top_p": 0.4}, 1.0),  # 1 of 2.25 is 44%
        ({"top_p": 0.5}, 0.5),
        ({"top_p": 0.85}, 0.5),  # 2 of 2.25 are 89%
        ({"top_p": 0.95}, 0.25),
        ({"top_p": 0.6, "top_k": 2}, 1.0),  # 1 of the 1.5 that top-k leaves is 67%
        ({"top_p": 0.7, "top_k": 2}, 0.5),
        ({"min_p": 0.3}, 0.3),
        ({"min_p": 0.3, "top_p": 0.95}, 0.3),
        ({"min_p": 0.3, "top_k": 1}, 1.0),
        ({}, 0.0),
        ({"temperature": 0.0, "top_p": 0.5, "min_p": 0.5}, 0.0),  # greedy rows need none
    ],
)
def test_the_smallest_weight_worked_by_hand(device, combination, smallest):
    logits = torch.tensor([[0.5, 0.25, 1.0, 0.5]], device=device).log()
    assert floors(logits, [combination]) == pytest.approx([smallest])


@on_each_device
@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    scores=st.lists(st.integers(-40, 20), min_size=2, max_size=60),
    top_k=st.integers(-1, 70),
    top_p=st.floats(0.001, 1.0),
    temperature=st.sampled_from([1.0, 0.6]),
)
def test_what_passes_is_what_a_sort_lets_through(device, scores, top_k, top_p, temperature):
    logits = np.array(scores, dtype=np.float64) / 4
    weights = np.exp((logits - logits.max()) / temperature)
    likeliest = np.sort(weights)[::-1]
    likeliest = likeliest[: top_k if top_k > 0 else None]
    before = np.cumsum(likeliest) - likeliest
    assume((np.abs(before / likeliest.sum() - top_p) > 1e-5).all())  # no rounding decides
    expected = likeliest[before < top_p * likeliest.sum()].min() if top_p < 1 else likeliest[-1]
    combination = {"top_k": top_k, "top_p": top_p, "temperature": temperature}
    (found,) = floors(torch.tensor(logits, device=device).float()[None], [combination])
    assert (weights >= 0.9999 * found).tolist() == (weights >= 0.9999 * expected).tolist()


@on_each_device
@on_each_dtype
def test_tokens_and_log_probs_are_those_of_the_plain_sampler(device, dtype, small_blocks):
    params, rows = rows_of(MIXTURE, device)
    logits = (3 * torch.randn(len(params), 300)).to(device, dtype)
    seen = (torch.rand(len(params), 300) < 0.3).to(device)
    tokens, log_probs = draw(logits, rows, seen=seen)
    index = torch.arange(len(params), device=device)
    expected, expected_log_probs = next_tokens(logits.float(), rows, Needs.of(params), index, seen)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=0, atol=4e-6)
    raw = [{**combination, "log_probs": "raw"} for combination in MIXTURE]
    _, raw_log_probs = draw(logits, rows_of(raw, device)[1], seen=seen)
    scores = (logits.float() / rows.temperature[:, None]).log_softmax(-1)
    torch.testing.assert_close(
        raw_log_probs, scores.gather(1, tokens[:, None]).squeeze(1), rtol=0, atol=4e-6
    )


@on_each_device
def test_the_penalty_comes_after_scale_and_soft_cap_and_before_the_temperature(device):
    combination = {"repetition_penalty": 1.8, "top_p": 0.8, "temperature": 0.5}
    params, rows = rows_of([combination] * 4, device)
    logits = (8 * torch.randn(4, 40)).to(device)
    seen = (torch.rand(4, 40) < 0.5).to(device)
    tokens, log_probs = draw(logits, rows, seen=seen, scale=0.25, softcap=2.0)
    capped = 2.0 * torch.tanh(logits * 0.25 / 2.0)
    index = torch.arange(4, device=device)
    expected, expected_log_probs = next_tokens(capped, rows, Needs.of(params), index, seen)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=0, atol=4e-6)


@on_each_device
def test_rows_whose_filters_are_off_get_the_same_bits_as_without_the_kernels(device, small_blocks):
    _, rows = rows_of([{}, {"temperature": 0.6}, {"temperature": 0.0}], device)
    logits = torch.randn(3, 300).to(device)
    seen = torch.ones(3, 300, dtype=torch.bool, device=device)
    tokens, log_probs = draw(logits, rows, seen=seen)
    expected, expected_log_probs = draw(logits, rows, filters=False)
    assert torch.equal(tokens, expected)
    assert torch.equal(log_probs, expected_log_probs)


@on_each_device
def test_raw_log_probs_are_the_bits_of_training(device, small_blocks):
    from verl.models.kernels.log_probs import logits_log_probs

    combination = {"repetition_penalty": 1.8, "min_p": 0.2, "temperature": 0.5}
    _, rows = rows_of([{**combination, "log_probs": "raw"}] * 6, device)
    logits = (2 * torch.randn(6, 300)).to(device, torch.bfloat16)
    seen = (torch.rand(6, 300) < 0.5).to(device)
    tokens, log_probs = draw(logits, rows, seen=seen)
    trained, _, _ = logits_log_probs(logits, tokens, temperature=0.5, scale=1.0, softcap=None)
    assert torch.equal(log_probs, trained)


@on_each_device
def test_what_a_filter_takes_away_is_never_drawn_and_all_else_is(device, small_blocks):
    _, rows = rows_of([{"min_p": 0.5}] * 30, device)
    logits = torch.full((30, 300), -2.0, device=device)
    logits[:, [3, 130, 290]] = torch.tensor([1.0, 0.9, 0.8], device=device)
    tokens, _ = draw(logits, rows)
    assert set(tokens.tolist()) == {3, 130, 290}


@on_each_device
def test_a_row_of_nan_ends_and_says_so(device):
    _, rows = rows_of([{"top_p": 0.5}, {"top_k": 3}], device)
    logits = torch.randn(2, 50).to(device)
    logits[0, 7] = torch.nan
    tokens, log_probs = draw(logits, rows)
    assert log_probs[0].isnan()
    assert log_probs[1].isfinite()
    assert ((tokens >= 0) & (tokens < 50)).all()


@pytest.mark.gpu
def test_rows_that_nobody_has_filled_end_with_a_token():
    rows = rows_of(MIXTURE, "cuda")[1].zeros(8)
    logits = torch.randn(8, 5000, device="cuda")
    seen = torch.zeros(8, 5000, dtype=torch.bool, device="cuda")
    tokens, _ = draw(logits, rows, seen=seen)
    assert ((tokens >= 0) & (tokens < 5000)).all()


@pytest.mark.gpu
@on_each_dtype
def test_with_a_real_vocabulary_tokens_are_those_of_the_plain_sampler(dtype):
    params, rows = rows_of(MIXTURE * 8, "cuda")
    logits = (3 * torch.randn(len(params), 151_936, device="cuda")).to(dtype)
    seen = torch.rand(len(params), 151_936, device="cuda") < 0.1
    tokens, log_probs = draw(logits, rows, seen=seen)
    index = torch.arange(len(params), device="cuda")
    expected, expected_log_probs = next_tokens(logits.float(), rows, Needs.of(params), index, seen)
    # A draw that falls between two tokens may be rounded to either side.
    assert (tokens != expected).sum() <= 1
    same = tokens == expected
    torch.testing.assert_close(log_probs[same], expected_log_probs[same], rtol=0, atol=1e-5)


@pytest.mark.gpu
def test_a_row_alone_and_among_others_has_the_same_bits():
    _, rows = rows_of(MIXTURE * 8, "cuda")
    logits = 3 * torch.randn(len(MIXTURE) * 8, 151_936, device="cuda")
    seen = torch.rand_like(logits) < 0.1
    together = draw(logits, rows, seen=seen)
    again = draw(logits, rows, seen=seen)
    assert torch.equal(together[0], again[0])
    assert torch.equal(together[1], again[1])
    for first in range(0, len(logits), 7):
        row = slice(first, first + 1)
        alone = draw(logits[row], rows[row], seen=seen[row], first_index=first)
        assert torch.equal(alone[0], together[0][row])
        assert torch.equal(alone[1], together[1][row])
