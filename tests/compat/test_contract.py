"""Behaviours of small public functions that code written for this interface relies on."""

import sys
import time
from types import ModuleType

import pytest
import torch

from verl.protocol import DataProto
from verl.utils.checkpoint.checkpoint_manager import should_save_ckpt_esi
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.import_utils import is_available, require
from verl.utils.metric import Metric
from verl.utils.py_functional import timeout_limit
from verl.utils.ray_utils import parallel_put
from verl.utils.reward_score.sandbox_fusion.utils import check_correctness

EXPIRATION = "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"


@pytest.mark.parametrize(
    ("ends_in", "step", "options", "expected"),
    [
        (90, 30, {}, True),
        (200, 30, {}, False),
        (-10, 30, {}, False),
        (90, 0, {}, False),
        (120, 30, {"redundant_time": 30}, True),
        (None, 30, {}, False),
    ],
)
def test_the_end_of_an_instance_may_have_a_fraction(monkeypatch, ends_in, step, options, expected):
    text = "soon" if ends_in is None else f"{int(time.time()) + ends_in}.04"
    monkeypatch.setenv(EXPIRATION, text)
    assert should_save_ckpt_esi(step, **options) is expected


def test_a_metric_takes_another_one_in():
    metric = Metric("max", [3, 4])
    metric.extend(Metric("max", [1, 2]))
    assert metric.values == [3, 4, 1, 2]
    with pytest.raises(ValueError, match="min metric cannot be added"):
        metric.extend(Metric("min"))
    chained = Metric.chain([Metric("sum", [1]), Metric("sum", [2, 3])])
    assert (chained.values, chained.aggregate()) == ([1, 2, 3], 6)
    empty = metric.init_list()
    assert (empty.values, empty.aggregation) == ([], metric.aggregation)


def test_a_stand_in_for_a_package_counts_as_installed(monkeypatch):
    stub = ModuleType("stub_of_a_package")
    stub.__spec__ = None
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    assert is_available(stub.__name__)
    assert require(stub.__name__) is stub


@pytest.mark.parametrize("has_mask", [False, True])
def test_debug_metrics_need_no_response_mask(has_mask):
    tensors = {
        "rollout_log_probs": torch.tensor([[0.0, -1.0]]),
        "old_log_probs": torch.tensor([[0.0, 0.0]]),
        "responses": torch.ones(1, 2, dtype=torch.long),
    }
    if has_mask:  # the last token is padding
        tensors["attention_mask"] = torch.tensor([[1, 1, 0]])
    found = calculate_debug_metrics(DataProto.from_dict(tensors))
    assert found["training/rollout_probs_diff_valid"] == 1
    assert (found["training/rollout_probs_diff_max"] == 0) is has_mask


@pytest.mark.parametrize(
    ("cases", "error"),
    [
        (None, "Invalid input/output data"),
        ({}, "Invalid input/output data"),
        ({"inputs": ["1"]}, "Invalid input/output data"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "Input/output count mismatch"),
    ],
)
def test_tests_that_cannot_be_run_are_one_service_error(cases, error):
    assert check_correctness("http://nowhere", cases, "code") == ([-1], [{"error": error}])


def test_wrong_arguments_and_timeouts_are_of_the_kind_that_callers_catch():
    with pytest.raises(AssertionError, match="nothing to put"):
        parallel_put([])
    with pytest.raises(TimeoutError, match=r"timed out after 0\.2 seconds"):
        timeout_limit(seconds=0.2)(time.sleep)(5)
