from types import SimpleNamespace

import pytest
import torch

from verl.utils import device
from verl.utils.device import (
    auto_set_device,
    check_cpu_bf16,
    get_device_capability,
    get_device_id,
    get_device_name,
    get_nccl_backend,
    get_torch_device,
    get_visible_devices_keyword,
    resolve_device,
    set_expandable_segments,
)
from verl.utils.environment import temp_env_var

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has CUDA")


def test_the_device_can_be_forced():
    with temp_env_var("VERL_FORCE_DEVICE", "NPU"):
        assert get_device_name() == "npu"
        assert get_nccl_backend() == "hccl"
        assert get_visible_devices_keyword() == "ASCEND_RT_VISIBLE_DEVICES"
    with temp_env_var("VERL_FORCE_DEVICE", "cuda"):
        assert get_nccl_backend() == "nccl"
        assert get_torch_device() is torch.cuda
        assert get_visible_devices_keyword() == "CUDA_VISIBLE_DEVICES"
    with (
        temp_env_var("VERL_FORCE_DEVICE", "gpu"),
        pytest.raises(ValueError, match="'gpu'; it must be one of: cuda, npu, cpu"),
    ):
        get_device_name()


def test_everything_follows_from_the_cpu():
    with temp_env_var("VERL_FORCE_DEVICE", "cpu"):
        assert resolve_device("auto") == resolve_device(None) == "cpu"
        assert get_torch_device() is torch.cpu
        assert get_device_id() == 0
        assert get_nccl_backend() == "gloo"
        assert get_device_capability() == (None, None)
        set_expandable_segments(True)  # nothing to set


@without_cuda
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"'cuda' was asked for.*trainer\.device=auto or cpu"):
        resolve_device("cuda")
    assert resolve_device("cpu") == "cpu"


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="'gpu'; it must be one of: auto, cuda, npu, cpu"):
        resolve_device("gpu")


@pytest.mark.parametrize("requested", ["auto", None])
def test_an_open_choice_of_device_is_settled_in_the_config(requested):
    config = SimpleNamespace(trainer=SimpleNamespace(device=requested))
    with temp_env_var("VERL_FORCE_DEVICE", "cpu"):
        auto_set_device(config)
    assert config.trainer.device == "cpu"


def test_a_written_device_stays():
    config = SimpleNamespace(trainer=SimpleNamespace(device="cpu"))
    auto_set_device(config)
    assert config.trainer.device == "cpu"


def test_cuda_means_npu_where_only_npus_are(monkeypatch):
    monkeypatch.setattr(device, "is_npu_available", True)
    monkeypatch.setattr(device, "is_cuda_available", False)
    config = SimpleNamespace(trainer=SimpleNamespace(device="cuda"))
    auto_set_device(config)
    assert config.trainer.device == "npu"


@pytest.fixture
def _fresh_probe():
    device._probe_cpu_bf16.cache_clear()
    yield
    device._probe_cpu_bf16.cache_clear()


@pytest.mark.usefixtures("_fresh_probe")
def test_bfloat16_that_kills_a_process_is_refused_with_the_cure(monkeypatch):
    monkeypatch.setattr(
        device, "_BF16_PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    )
    with pytest.raises(RuntimeError, match=r"signal 4.*ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"):
        check_cpu_bf16()


@pytest.mark.usefixtures("_fresh_probe")
def test_bfloat16_that_works_passes_and_is_tried_once(monkeypatch):
    check_cpu_bf16()  # the test environment sets what this machine needs
    monkeypatch.setattr(device, "_BF16_PROBE", "raise SystemExit(1)")
    check_cpu_bf16()
