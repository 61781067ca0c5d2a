"""Where kernels run, and what is said where they cannot."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from verl.models.kernels import availability
from verl.models.kernels.availability import (
    attention_bytes,
    can_run_triton,
    has_large_shared_memory,
    is_recent_capability,
    rows_that_fit,
    stages_that_fit,
)
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


HOPPER, A100, SMALL = 232_448, 166_912, 101_376
KEYS = 64
ONE_STAGE_LESS = {
    "packed": (64, 1),
    "prompt slots": (64, 1),
    "prompt pages": (64, 1),
    "decode slots": (16, 2),
}


def queries(dim, dtype):
    return torch.empty(1, 1, dim, dtype=dtype)


@pytest.fixture
def give(monkeypatch):
    """Give the device of all tensors so much shared memory."""

    def give(room):
        monkeypatch.setattr(availability, "shared_memory_bytes", lambda device: room)

    return give


def wanted(dim, dtype):
    """Rows, stages and pages of each kernel where there is room for everything."""
    is_narrow = dim <= 64
    fits_many = dim * dtype.itemsize <= 256
    return {
        "packed": (128 if fits_many else 64, 3 if fits_many else 2, False),
        "prompt slots": (64, 3 if is_narrow else 2, False),
        "prompt pages": (64, 5 if is_narrow else 2, True),
        "decode slots": (16, 3, False),
        "decode pages": (16, 5 if is_narrow else 3, True),
    }


def changes(dim, dtype):
    """Rows and stages of the kernels that do not get what they want."""
    query, changed = queries(dim, dtype), {}
    for kernel, (num_rows, num_stages, is_paged) in wanted(dim, dtype).items():
        fitting = rows_that_fit(num_rows, query, num_keys=KEYS)
        stages = stages_that_fit(num_stages, query, fitting, num_keys=KEYS, is_paged=is_paged)
        if (fitting, stages) != (num_rows, num_stages):
            changed[kernel] = (fitting, stages)
    return changed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 192, 256])
def test_a_hopper_gives_all_kernels_what_they_want(give, dim, dtype):
    give(HOPPER)
    # The one that was too large for it as well.
    is_too_large = dim > 128 and dtype == torch.float32
    assert changes(dim, dtype) == ({"decode slots": (16, 2)} if is_too_large else {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cpu_has_no_shared_memory_to_run_out_of(dtype):
    assert changes(256, dtype) == {}
    assert has_large_shared_memory(torch.device("cpu"))


@pytest.mark.parametrize(
    ("room", "dim", "dtype", "expected"),
    [
        (A100, 256, torch.bfloat16, {}),
        (A100, 128, torch.float32, {}),
        (A100, 256, torch.float32, ONE_STAGE_LESS),
        (SMALL, 64, torch.bfloat16, {}),
        (SMALL, 256, torch.bfloat16, ONE_STAGE_LESS),
        (SMALL, 128, torch.float32, ONE_STAGE_LESS),
        (SMALL, 256, torch.float32, dict.fromkeys(wanted(256, torch.float32), (16, 1))),
    ],
)
def test_smaller_devices_give_fewer_stages_and_then_fewer_rows(give, room, dim, dtype, expected):
    give(room)
    assert changes(dim, dtype) == expected


@pytest.mark.parametrize(
    ("room", "dim", "dtype", "expected"),
    [
        (HOPPER, 64, torch.bfloat16, (128, {"num_warps": 8, "num_stages": 3, "maxnreg": 128})),
        (HOPPER, 128, torch.bfloat16, (128, {"num_warps": 8, "num_stages": 3})),
        (HOPPER, 256, torch.bfloat16, (64, {"num_warps": 4, "num_stages": 2})),
        (HOPPER, 256, torch.float32, (64, {"num_warps": 4, "num_stages": 2})),
        (A100, 256, torch.float32, (64, {"num_warps": 4, "num_stages": 1})),
        (SMALL, 128, torch.bfloat16, (64, {"num_warps": 4, "num_stages": 1})),
        (SMALL, 256, torch.float32, (16, {"num_warps": 4, "num_stages": 1})),
    ],
)
def test_packed_attention_is_launched_for_the_device(give, room, dim, dtype, expected):
    pytest.importorskip("triton")
    from verl.models.kernels.packed_attention import launch_options, tokens_per_tile

    give(room)
    query = queries(dim, dtype)
    num_rows = tokens_per_tile(query, query)  # one query head per KV head
    assert (num_rows, launch_options(query, num_rows)) == expected


# As Triton 3.6 compiled them for compute capability 8.6.
@pytest.mark.parametrize(
    ("dim", "dtype", "num_rows", "num_stages", "is_paged", "compiled"),
    [
        (96, torch.bfloat16, 64, 2, False, 57_344),
        (128, torch.bfloat16, 16, 3, False, 71_680),
        (128, torch.bfloat16, 16, 3, True, 38_916),
        (256, torch.bfloat16, 64, 2, False, 106_496),
        (256, torch.bfloat16, 64, 1, False, 73_728),
        (64, torch.float32, 64, 5, True, 98_320),
        (128, torch.float32, 16, 3, False, 143_424),
        (128, torch.float32, 64, 2, True, 114_944),
        (256, torch.float32, 64, 1, False, 147_712),
        (256, torch.float32, 16, 3, True, 151_620),
    ],
)
def test_sizes_are_those_of_the_compiler(dim, dtype, num_rows, num_stages, is_paged, compiled):
    found = attention_bytes(
        queries(dim, dtype), num_rows, num_stages, num_keys=KEYS, is_paged=is_paged
    )
    assert compiled <= found <= compiled + 256


@pytest.mark.parametrize(
    ("capability", "room", "dim", "dtype"),
    [
        (86, SMALL, 256, "bfloat16"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (80, A100, 128, "bfloat16"),
                (80, A100, 256, "bfloat16"),
                (86, SMALL, 64, "float32"),
                (86, SMALL, 96, "float16"),
                (86, SMALL, 128, "float32"),
                (86, SMALL, 256, "float32"),
                (120, SMALL, 128, "bfloat16"),
                (120, SMALL, 256, "bfloat16"),
            )
        ),
    ],
)
def test_compiled_kernels_fit_the_device(tmp_path, capability, room, dim, dtype):
    pytest.importorskip("triton")
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    arguments = map(str, (capability, room, dim, dtype))
    output = subprocess.run(
        [sys.executable, "-m", "tests.models.kernels.compile_for", *arguments],
        env=variables | {"TRITON_CACHE_DIR": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    taken = [(name, int(size)) for name, size in map(str.split, output.splitlines())]
    assert {"_packed_attention", "_prompt_states", "_slot_decode"} <= {name for name, _ in taken}
    assert [(name, size) for name, size in taken if size > room] == []
