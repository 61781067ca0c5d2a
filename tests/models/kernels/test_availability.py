"""Where kernels run, and what is said where they cannot."""

import logging

import pytest

from verl.models.kernels import availability
from verl.models.kernels.availability import can_run_triton
from verl.utils.import_utils import is_available


def test_a_cpu_runs_kernels_only_while_triton_interprets_them(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not can_run_triton("cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert can_run_triton("cpu") == is_available("triton")


def test_a_device_without_memory_runs_no_kernels(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not can_run_triton("meta")


def test_a_gpu_without_triton_is_mentioned_once(monkeypatch, caplog):
    monkeypatch.setattr(availability, "is_available", lambda package: False)
    availability._has_triton_for_cuda.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert not can_run_triton("cuda:0")
            assert not can_run_triton("cuda:1")
    finally:
        availability._has_triton_for_cuda.cache_clear()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "pip install triton" in caplog.text


@pytest.mark.gpu
def test_a_gpu_with_triton_runs_kernels():
    assert can_run_triton("cuda")
