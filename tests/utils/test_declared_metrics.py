"""The table of metrics covers what runs report, and the page is made from it."""

from pathlib import Path

import pytest

from verl.utils.metric import AggregationType
from verl.utils.metric.declared import SECTIONS, as_markdown, declare, declared_metric

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_is_made_from_the_table():
    assert PAGE.read_text() == as_markdown()


def test_no_name_is_declared_twice():
    names = [metric.name for section in SECTIONS for metric in section.metrics]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "combine"),
    [
        ("actor/pg_loss", "sum"),
        ("critic/num_optimizer_steps", "sum"),
        ("timing_s/agent_loop/slowest/tool_calls", "max"),
        ("rollout_corr/rollout_rs_token_k1_seq_max", "max"),
        ("rollout_corr/rollout_rs_token_k1_seq_fraction_low", "mean"),
        ("val-core/gsm8k/reward/mean@1", "mean"),
    ],
)
def test_a_name_is_found_with_the_parts_a_run_fills_in(name, combine):
    metric = declared_metric(name)
    assert metric is not None
    assert metric.combine is AggregationType(combine)


def test_a_suffix_decides_nothing():
    assert declared_metric("actor/my_loss") is None
    declare("actor/my_own_loss", "loss", "sum", "A loss of a recipe.")
    found = declared_metric("actor/my_own_loss")
    assert found is not None
    assert found.combine is AggregationType.SUM
