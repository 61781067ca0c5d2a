"""Where kernels run, and what is said where they cannot."""

import logging

import pytest
import torch

from verl.models.kernels import availability
from verl.models.kernels.availability import can_run_triton, is_recent_capability
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


@pytest.fixture
def gpus(monkeypatch):
    """Names and capabilities of the GPUs that torch finds."""
    found = {}
    caches = (availability._has_triton_for_cuda, availability._is_recent, is_recent_capability)
    monkeypatch.setattr(availability, "is_available", lambda package: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: found[str(device)][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found[str(device)][1])
    for cached in caches:
        cached.cache_clear()
    yield found
    for cached in caches:
        cached.cache_clear()


def test_a_gpu_that_is_too_old_is_mentioned_once_with_the_rule(gpus, caplog):
    gpus |= {"cuda:0": ("Tesla T4", (7, 5)), "cuda:1": ("Tesla T4", (7, 5))}
    with caplog.at_level(logging.WARNING):
        assert [can_run_triton(f"cuda:{i}") for i in (0, 1, 0)] == [False] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Tesla T4 has compute capability 7.5" in caplog.text
    assert "need 8.0 or newer" in caplog.text
    assert "plain torch is used" in caplog.text


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)])
def test_a_gpu_from_ampere_on_runs_kernels(gpus, caplog, capability):
    gpus["cuda:0"] = ("a GPU", capability)
    assert can_run_triton("cuda:0")
    assert caplog.records == []


def test_a_gpu_of_amd_runs_none_although_torch_calls_it_cuda(gpus, monkeypatch, caplog):
    gpus["cuda:0"] = ("AMD Instinct MI300X", (9, 4))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with caplog.at_level(logging.WARNING):
        assert [can_run_triton("cuda:0") for _ in range(2)] == [False] * 2
    assert len(caplog.records) == 1
    assert "NVIDIA" in caplog.text


@pytest.mark.gpu
def test_a_gpu_with_triton_runs_kernels():
    assert can_run_triton("cuda")
