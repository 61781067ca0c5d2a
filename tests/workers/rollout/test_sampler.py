"""Which tokens are drawn, how often, and with which log-probability."""

import dataclasses
import math

import pytest
import torch

from verl.algos.rollout_correction import compute_rollout_correction_and_rejection_mask
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.native import sampler
from verl.workers.rollout.native.rows import RowSettings
from verl.workers.rollout.native.sampler import (
    Needs,
    draw,
    next_tokens,
    smallest_candidate,
    uniform,
    weights_and_log_sum,
)
from verl.workers.rollout.native.sequence import sample_seeds

CPU = torch.device("cpu")


def pick(logits, params, *, seeds=None, index=0, seen=None):
    """One token per row; `params` is one for all rows or one for each."""
    logits = torch.as_tensor(logits)
    rows = params if isinstance(params, list) else [params] * len(logits)
    seeds = list(range(len(logits))) if seeds is None else seeds
    settings = RowSettings.of(rows, seeds, CPU)
    indices = torch.full((len(logits),), index)
    return next_tokens(logits, settings, Needs.of(rows), indices, seen)


def kept(probabilities, **filters):
    """Which tokens can be drawn at all, from many draws."""
    logits = torch.tensor([probabilities]).log().expand(4000, -1)
    tokens, _ = pick(logits, SamplingParams(**filters))
    return sorted(set(tokens.tolist()))


def test_top_k_keeps_the_likeliest():
    assert kept([0.1, 0.4, 0.2, 0.3], top_k=2) == [1, 3]
    assert kept([0.1, 0.4, 0.2, 0.3], top_k=1) == [1]


@pytest.mark.parametrize("top_k", [-1, 0, 4, 1000])
def test_top_k_that_is_off_or_beyond_the_vocabulary_keeps_all(top_k):
    assert kept([0.1, 0.4, 0.2, 0.3], top_k=top_k) == [0, 1, 2, 3]


def test_top_k_keeps_tokens_as_likely_as_the_last():
    assert kept([0.1, 0.4, 0.25, 0.25], top_k=2) == [1, 2, 3]


def test_top_p_keeps_the_fewest_tokens_that_reach_the_sum():
    assert kept([0.1, 0.4, 0.2, 0.3], top_p=0.65) == [1, 3]  # 0.4 + 0.3
    assert kept([0.1, 0.4, 0.2, 0.3], top_p=0.75) == [1, 2, 3]  # + 0.2
    assert kept([0.1, 0.4, 0.2, 0.3], top_p=0.01) == [1]


def test_top_p_counts_what_top_k_left():
    # Of 0.4 and 0.3 the first is 57%: without top-k, 0.55 would need both.
    assert kept([0.1, 0.4, 0.2, 0.3], top_p=0.55) == [1, 3]
    assert kept([0.1, 0.4, 0.2, 0.3], top_p=0.55, top_k=2) == [1]


def test_min_p_keeps_what_is_at_least_that_share_of_the_likeliest():
    assert kept([0.1, 0.4, 0.2, 0.3], min_p=0.49) == [1, 2, 3]  # 0.196 and more
    assert kept([0.1, 0.4, 0.2, 0.3], min_p=0.51) == [1, 3]
    assert kept([0.1, 0.4, 0.2, 0.3], min_p=1.0) == [1]


def test_the_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    logits = torch.tensor([[2.0, 1.5, -1.0, -1.5]])
    seen = torch.tensor([[True, False, True, False]])
    settings = RowSettings.of([SamplingParams(repetition_penalty=2.0)], [0], CPU)
    assert sampler.penalised(logits, settings, seen).tolist() == [[1.0, 1.5, -2.0, -1.5]]
    tokens, log_probs = pick(
        logits, SamplingParams(temperature=0, repetition_penalty=2.0), seen=seen
    )
    assert tokens.tolist() == [1]
    torch.testing.assert_close(log_probs, logits.log_softmax(-1)[:, 1])  # of the raw logits


def test_temperature_zero_takes_the_likeliest_and_reports_it_at_temperature_one():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    tokens, log_probs = pick(logits, SamplingParams(temperature=0))
    assert tokens.tolist() == [1]
    torch.testing.assert_close(log_probs, logits.log_softmax(-1)[:, 1])


def test_a_row_gets_the_same_token_whatever_its_neighbours_ask_for():
    logits = torch.randn(6, 300)
    mixed = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.5, temperature=0.7),
        SamplingParams(min_p=0.2),
        SamplingParams(repetition_penalty=1.5),
    ]
    seen = torch.zeros(6, 300, dtype=torch.bool)
    together = pick(logits, mixed, seen=seen)
    for row, params in enumerate(mixed):
        alone = pick(logits[row : row + 1], params, seeds=[row], seen=seen[row : row + 1])
        assert torch.equal(alone[0], together[0][row : row + 1])
        assert torch.equal(alone[1], together[1][row : row + 1])


FILTERS = [
    {},
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.4},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "top_k": 9, "top_p": 0.8, "min_p": 0.1},
]


@pytest.mark.parametrize("filters", FILTERS)
def test_raw_log_probs_are_those_of_the_whole_distribution_at_that_temperature(filters):
    logits = torch.randn(50, 40)
    seen = torch.rand(50, 40) < 0.5
    params = SamplingParams(temperature=0.7, log_probs="raw", **filters)
    tokens, log_probs = pick(logits, params, seen=seen)
    whole = (logits / 0.7).log_softmax(-1)
    torch.testing.assert_close(log_probs, whole.gather(1, tokens[:, None]).squeeze(1))
    processed, _ = pick(logits, dataclasses.replace(params, log_probs="processed"), seen=seen)
    assert torch.equal(processed, tokens)


@pytest.mark.parametrize("filters", FILTERS)
def test_processed_log_probs_are_those_of_what_tokens_are_drawn_from(filters):
    logits = torch.randn(50, 40)
    seen = torch.rand(50, 40) < 0.5
    tokens, log_probs = pick(logits, SamplingParams(temperature=0.7, **filters), seen=seen)
    expected = processed_log_probs(logits.double(), seen, 0.7, **filters)
    torch.testing.assert_close(
        log_probs.double(), expected.gather(1, tokens[:, None]).squeeze(1), atol=2e-6, rtol=0
    )


def processed_log_probs(
    logits, seen, temperature, top_k=-1, top_p=1.0, min_p=0.0, repetition_penalty=1.0
):
    """(B, V) by sorting, row by row; -inf for what is filtered out."""
    logits = torch.where(
        seen & (logits > 0),
        logits / repetition_penalty,
        torch.where(seen, logits * repetition_penalty, logits),
    )
    rows = []
    for row in (logits / temperature).softmax(-1):
        order = row.argsort(descending=True)[: top_k if top_k > 0 else None]
        share = row[order] / row[order].sum()
        order = order[share.cumsum(0) - share < top_p]
        order = order[row[order] >= min_p * row.max()]
        rows.append(torch.full_like(row, -torch.inf))
        rows[-1][order] = (row[order] / row[order].sum()).log()
    return torch.stack(rows)


def test_importance_weights_of_processed_log_probs_show_what_a_filter_took_away():
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().expand(64, -1)
    mask = torch.ones(64, 1)
    found = {}
    for kind in ("processed", "raw"):
        tokens, log_probs = pick(logits, SamplingParams(top_k=2, log_probs=kind))
        trained = logits.log_softmax(-1).gather(1, tokens[:, None])
        weights, _, metrics = compute_rollout_correction_and_rejection_mask(
            trained, log_probs[:, None], mask, rollout_is="token"
        )
        found[kind] = (weights.batch["rollout_is_weights"], metrics["rollout_corr/kl"])
    # Top-k keeps 0.4 + 0.3: every token was 1 / 0.7 times as likely as the policy has it.
    torch.testing.assert_close(found["processed"][0], torch.full((64, 1), 0.7))
    assert found["processed"][1] == pytest.approx(-math.log(0.7), abs=1e-6)
    torch.testing.assert_close(found["raw"][0], torch.ones(64, 1))
    assert found["raw"][1] == pytest.approx(0.0, abs=1e-6)


def test_log_probs_of_an_unknown_kind_are_refused():
    with pytest.raises(ValueError, match="log_probs is tempered; it must be processed or raw"):
        SamplingParams(log_probs="tempered")


def test_the_log_sum_is_torchs_own_to_the_last_bit():
    for shape in ((3, 17), (64, 4096), (1, 151_936)):
        scores = 3 * torch.randn(*shape)
        assert torch.equal(weights_and_log_sum(scores)[1], scores.logsumexp(-1))


def test_many_candidates_give_the_same_threshold_as_few():
    weights = torch.rand(5, 3000)
    top_p = torch.tensor([0.1, 0.5, 0.9, 0.99, 1.0], dtype=torch.float64)
    top_k = torch.tensor([0, 7, 0, 0, 0])
    few = smallest_candidate(weights, top_k, top_p, num_candidates=2)
    assert torch.equal(few, smallest_candidate(weights, top_k, top_p, num_candidates=3000))
    mass = torch.where(weights >= few[:, None], weights, 0).sum(-1) / weights.sum(-1)
    torch.testing.assert_close(mass[[0, 2, 3]], top_p[[0, 2, 3]].float(), rtol=0, atol=1e-3)


def test_a_token_of_weight_zero_is_never_drawn_not_even_at_the_ends():
    weights = torch.zeros(3, 1000)
    weights[:, [300, 301, 700]] = torch.tensor([0.2, 1e-30, 0.7])
    ends = torch.tensor([0.0, 0.5, sampler.LARGEST_UNIFORM], dtype=torch.float64)
    assert draw(weights, ends).tolist() == [300, 700, 700]


def test_unlikely_tokens_at_the_end_of_a_large_vocabulary_are_reached():
    """Half of the mass is spread over tokens that fp32 would lose one by one beside the first."""
    size = 1 << 18
    weights = torch.full((1, size), 1.0 / (size - 1))
    weights[0, 0] = 1.0
    points = torch.tensor([0.499, 0.501, 0.75, 0.9999], dtype=torch.float64)
    tokens = draw(weights.expand(4, -1), points).double()
    expected = torch.tensor([0.0, 0.002, 0.5, 0.9998]) * size
    torch.testing.assert_close(tokens, expected.double(), rtol=1e-3, atol=1)


# ---- distribution --------------------------------------------------------------------------------


def chi_square_bound(degrees):
    """What chi-square exceeds once in a thousand times (Wilson and Hilferty)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.09 * math.sqrt(spread)) ** 3


def filtered_distribution(logits, params, seen):
    """Slow and plain: sort, cut, renormalise."""
    scores = [
        (z / params.repetition_penalty if z > 0 else z * params.repetition_penalty) if s else z
        for z, s in zip(logits, seen, strict=True)
    ]
    weights = [math.exp(z / params.temperature) for z in scores]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    if params.top_k > 0:
        order = order[: params.top_k]
    total, mass, chosen = sum(weights[i] for i in order), 0.0, []
    for token in order:
        if mass < params.top_p * total and weights[token] >= params.min_p * weights[order[0]]:
            chosen.append(token)
        mass += weights[token]
    kept_mass = sum(weights[i] for i in chosen)
    return {token: weights[token] / kept_mass for token in chosen}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.8),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.3),
        SamplingParams(repetition_penalty=1.6),
        SamplingParams(temperature=1.3, top_k=8, top_p=0.9, min_p=0.05, repetition_penalty=1.2),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_the_filtered_softmax_says(params):
    num_draws, vocabulary = 40_000, 200  # more than one chunk
    logits = 2.5 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(1))
    seen = torch.rand(vocabulary, generator=torch.Generator().manual_seed(2)) < 0.4
    tokens, _ = pick(logits.expand(num_draws, -1), params, seen=seen.expand(num_draws, -1), index=3)
    expected = filtered_distribution(logits.tolist(), params, seen.tolist())
    counts = torch.bincount(tokens, minlength=vocabulary).tolist()
    assert sum(counts[token] for token in expected) == num_draws, "a token that was cut was drawn"
    common = [token for token, p in expected.items() if p * num_draws >= 5]
    rest = num_draws - sum(counts[token] for token in common)
    pairs = [(counts[token], expected[token] * num_draws) for token in common]
    if len(common) < len(expected):
        pairs.append((rest, num_draws - sum(e for _, e in pairs)))
    statistic = sum((count - e) ** 2 / e for count, e in pairs)
    assert statistic < chi_square_bound(len(pairs) - 1)


@pytest.mark.parametrize("varies", ["seed", "token", "sample"])
def test_uniform_numbers_fill_the_interval_evenly_and_do_not_follow_each_other(varies):
    count = 50_000
    numbers, zeros = torch.arange(count), torch.zeros(count, dtype=torch.long)
    if varies == "seed":
        u = uniform(numbers, zeros)
    elif varies == "token":
        u = uniform(zeros + 7, numbers)
    else:
        u = uniform(torch.tensor(sample_seeds([7] * count, range(count))), zeros)
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    counts = torch.histc(u.float(), bins=100, min=0, max=1)
    assert float(((counts - count / 100) ** 2 / (count / 100)).sum()) < chi_square_bound(99)
    neighbours = torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]
    assert abs(float(neighbours)) < 4 / math.sqrt(count)


def test_every_seed_and_sample_has_a_stream_of_its_own():
    pairs = [(seed, index) for seed in range(-100, 100) for index in range(50)]
    seeds = sample_seeds(*zip(*pairs, strict=True))
    assert len(set(seeds)) == len(pairs)
    large = sample_seeds([2**70 + 3, 2**70 + 4], [0, 0])  # any integer will do
    assert large == sample_seeds([3, 4], [0, 0])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
        ("stop", "text"),
        ("stop", ("",)),
        ("temperature", math.nan),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})
