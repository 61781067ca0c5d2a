"""Statistics of rows that share a label."""

import time
import uuid

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.utils.groupwise import (
    as_torch_index,
    group_mean_std,
    group_sum,
    group_top_two,
    group_weighted_mean,
)


def test_labels_become_consecutive_numbers_in_sorted_order():
    assert as_torch_index(np.array(["b", "a", "b", "c"], dtype=object)).tolist() == [1, 0, 1, 2]
    assert as_torch_index(np.array(["b", "a", "b", "c"])).tolist() == [1, 0, 1, 2]
    assert as_torch_index(np.array([70, 5, 70])).tolist() == [1, 0, 1]
    assert as_torch_index([2, 2, 5, 7, 5, 2]).tolist() == [0, 0, 1, 2, 1, 0]
    assert as_torch_index(torch.tensor([9, 9, -1])).tolist() == [1, 1, 0]
    assert as_torch_index([]).tolist() == []
    assert as_torch_index(["x"]).dtype == torch.int64


def test_labels_of_other_types_are_numbered_as_they_appear():
    one, two = uuid.UUID(int=1), uuid.UUID(int=2)
    assert as_torch_index([two, one, two]).tolist() == [0, 1, 0]
    assert as_torch_index([1, "1", 1]).tolist() == [0, 1, 0]  # a number is not its text
    assert as_torch_index([2**80, 1, 2**80]).tolist() == [0, 1, 0]
    assert as_torch_index([1.5, 0.5, 1.5]).tolist() == [0, 1, 0]
    assert as_torch_index(["\ud800", "a", "\ud800"]).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    "labels", [["a", None], [1, None], [1.0, float("nan")], np.array([0.0, np.nan])]
)
def test_a_row_without_a_label_is_refused_by_row(labels):
    with pytest.raises(ValueError, match="row 1 has no group label"):
        as_torch_index(labels)


def test_one_label_per_row_is_needed():
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        as_torch_index(np.zeros((2, 2), dtype=int))
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
        group_mean_std(torch.zeros(3), torch.zeros(2, dtype=torch.long))


@settings(deadline=None)
@given(labels=st.lists(st.text(max_size=3), max_size=20) | st.lists(st.integers(-(2**62), 2**62)))
def test_numbers_are_equal_exactly_where_labels_are(labels):
    numbers = as_torch_index(labels).tolist()
    if labels:
        assert sorted(set(numbers)) == list(range(len(set(labels))))
    assert numbers == [sorted(set(labels), key=sort_key).index(label) for label in labels]


def sort_key(label):
    return label.encode() if isinstance(label, str) else label


def test_mean_and_sample_deviation_of_each_group():
    scores = torch.tensor([1.0, 3.0, 5.0, 0.0, 1.0, 8.0])
    mean, std, count = group_mean_std(scores, torch.tensor([0, 0, 0, 1, 1, 2]))
    assert mean.tolist() == [3.0, 0.5, 0.0]  # a single row has nothing to be compared with
    assert std.tolist() == pytest.approx([2.0, 0.5**0.5, 1.0])
    assert count.tolist() == [3, 2, 1]


def test_equal_values_have_exactly_their_mean_and_no_deviation():
    for value, size in [(0.1, 3), (1e-30, 7), (1 / 3, 10), (16777217.0, 6)]:
        scores = torch.full((size,), value, dtype=torch.float64)
        mean, std, _ = group_mean_std(scores, torch.zeros(size, dtype=torch.long), eps=0.0)
        assert mean.tolist() == [value]
        assert std.tolist() == [0.0]


def test_a_large_offset_does_not_drown_the_deviation():
    scores = torch.tensor([1e8, 1e8 + 8, 1e8 + 16], dtype=torch.float32)
    mean, std, _ = group_mean_std(scores, torch.zeros(3, dtype=torch.long))
    assert mean.tolist() == [1e8 + 8]
    assert std.tolist() == [8.0]


def test_eps_is_the_least_deviation_returned():
    _, std, _ = group_mean_std(torch.ones(2), torch.zeros(2, dtype=torch.long), eps=0.25)
    assert std.tolist() == [0.25]


def test_no_rows_make_no_groups():
    mean, std, count = group_mean_std(torch.zeros(0), torch.zeros(0, dtype=torch.long))
    assert len(mean) == len(std) == len(count) == 0


def test_integer_scores_are_averaged_as_numbers():
    mean, _, _ = group_mean_std(torch.tensor([0, 1]), torch.zeros(2, dtype=torch.long))
    assert mean.tolist() == [0.5]


def test_a_weighted_mean_looks_only_at_rows_with_weight():
    values = torch.tensor([[1.0, 7.0], [4.0, 8.0], [5.0, 9.0]])
    weights = torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, 3.0]])
    mean = group_weighted_mean(values, weights, torch.tensor([0, 0, 1]))
    assert mean.tolist() == [[3.0, 0.0], [5.0, 9.0]]


def test_sum_and_the_two_largest_rows_of_each_group():
    gidx = torch.tensor([1, 0, 1, 0, 1])
    values = torch.tensor([2.0, 7.0, 5.0, 7.0, 3.0])
    assert group_sum(values, gidx).tolist() == [14.0, 10.0]
    best, second = group_top_two(values, gidx)
    assert best.tolist() == [1, 2]  # among equals the earlier row
    assert second.tolist() == [3, 4]


@pytest.mark.parametrize("kind", ["uuid", "integer"])
def test_a_million_rows_take_a_fraction_of_a_second_of_cpu_time(kind):
    num_prompts, responses = 125_000, 8
    if kind == "uuid":
        labels = np.array([f"{n * 2654435761:036x}" for n in range(num_prompts)], dtype=object)
    else:
        labels = np.arange(num_prompts)
    index, scores = np.repeat(labels, responses), torch.randn(num_prompts * responses)
    fastest = min(_seconds(index, scores) for _ in range(3))
    assert fastest < 2.0  # a Python loop over the rows takes longer on any machine


def _seconds(index, scores):
    start = time.thread_time()
    group_mean_std(scores, as_torch_index(index))
    return time.thread_time() - start
