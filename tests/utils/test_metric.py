import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.metric import AggregationType, Metric, reduce_metrics
from verl.utils.metric.utils import aggregation_of


def test_a_mean_weighs_each_part_by_what_it_covers():
    loss = Metric(AggregationType.MEAN)
    loss.append(1.0, weight=30)  # 30 tokens
    loss.append(4.0, weight=10)
    assert loss.aggregate() == 1.75  # (30 + 40) / 40


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("mean", 2.0), ("sum", 8.0), ("min", -1.0), ("max", 5.0)]
)
def test_each_rule_joins_the_parts_its_own_way(aggregation, expected):
    parts = [torch.tensor(1.0), np.float32(5.0), -1, 3.0]
    assert Metric(aggregation, parts).aggregate() == expected


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.data())
def test_the_mean_does_not_depend_on_how_the_parts_were_grouped(values, data):
    cut = data.draw(st.integers(0, len(values)))
    order = data.draw(st.permutations(values))
    ranks = [Metric("mean", list(order[:cut])), Metric("mean", list(order[cut:]))]
    assert Metric.merge(ranks).aggregate() == Metric("mean", values).aggregate()


def test_a_part_without_weight_does_not_count_even_when_it_is_nan():
    loss = Metric("mean")
    loss.append(math.nan, weight=0)
    loss.append(2.0, weight=5)
    assert loss.aggregate() == 2.0


def test_nothing_measured_is_nan_and_not_zero():
    assert math.isnan(Metric("mean").aggregate())
    assert math.isnan(reduce_metrics({"actor/loss": []})["actor/loss"])


def test_a_nan_part_shows_in_every_rule_wherever_it_stands():
    for aggregation in AggregationType:
        for parts in ([math.nan, 1.0], [1.0, math.nan]):
            assert math.isnan(Metric(aggregation, parts).aggregate())
    assert math.isnan(Metric("sum", [math.inf, -math.inf]).aggregate())


def test_metrics_with_different_rules_do_not_mix():
    with pytest.raises(ValueError, match="a max metric cannot be added to a mean metric"):
        Metric("mean").append(Metric("max", 1.0))
    with pytest.raises(ValueError, match="unknown aggregation 'median'; it is one of: mean, sum"):
        Metric("median")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("critic/score/max", "max"),
        ("perf/max_memory_allocated_gb", "max"),
        ("log_ppl_diff_min", "min"),
        ("gen_max", "max"),
        ("response/terminated", "mean"),  # "min" is inside a word
        ("data/maximal", "mean"),
        ("actor/entropy", "mean"),
        ("rollout_rs_seq_max_k2_mean", "mean"),  # the last word says what the number is
        ("rollout_rs_seq_max_k2_min", "min"),
        ("rollout_is_seq_max_deviation", "max"),
        ("rollout_rs_seq_max_k2_fraction_high", "mean"),
        ("global_seqlen/minmax_diff", "mean"),
    ],
)
def test_a_plain_list_is_reduced_by_the_last_whole_word_of_its_name(name, rule):
    assert aggregation_of(name) is AggregationType(rule)


def test_reduce_metrics_returns_one_number_per_name_and_leaves_its_input_alone():
    metrics = {
        "response/terminated": [0.0, 1.0],
        "actor/grad_norm": [[1.0, 2.0], [6.0]],  # ragged parts count once each
        "actor/ratio_max": [torch.tensor(1.0), torch.tensor(3.0)],
        "actor/lr": 0.5,
        "actor/loss": [Metric("sum", 1.0), Metric("sum", 2.0)],
        "note": "text",
    }
    assert reduce_metrics(metrics) == {
        "response/terminated": 0.5,
        "actor/grad_norm": 3.0,
        "actor/ratio_max": 3.0,
        "actor/lr": 0.5,
        "actor/loss": 3.0,
        "note": "text",
    }
    assert metrics["actor/lr"] == 0.5
    assert metrics["response/terminated"] == [0.0, 1.0]


@pytest.mark.parametrize("value", [[1.0, None], ["high"], [{"a": 1}]])
def test_an_entry_that_is_no_number_is_refused_by_name(value):
    with pytest.raises(ValueError, match="metric 'actor/x' holds"):
        reduce_metrics({"actor/x": value})
    with pytest.raises(ValueError, match="metric 'actor/x' mixes Metric objects"):
        reduce_metrics({"actor/x": [Metric("sum", 1.0), 2.0]})
