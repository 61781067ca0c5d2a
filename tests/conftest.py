"""What holds for every test: no bf16 crash, no spinning threads, a seed, no rank left behind."""

import gc
import os

# Must be set before torch is imported: AMX that is advertised but cannot run dies with SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _no_rank_left_behind() -> Iterator[None]:
    """A worker group in this process makes it rank 0 of 1 until it is gone; trainers hold theirs in
    reference cycles, which only the collector ends. A process group would be inherited by forks."""
    yield
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
