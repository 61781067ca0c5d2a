"""How much memory the cache may take."""

import pytest
import torch

from verl.workers.rollout.native import cache as memory
from verl.workers.rollout.native.sequence import EngineLimits


def test_the_budget_is_a_share_of_what_the_machine_has():
    cpu = torch.device("cpu")
    whole = memory.cache_budget(cpu, 1.0)
    assert 2**28 < whole < 2**48
    assert memory.cache_budget(cpu, 0.25) == whole // 4


def test_a_container_with_less_than_the_machine_counts(tmp_path, monkeypatch):
    unlimited, limited = tmp_path / "memory.max", tmp_path / "limit"
    unlimited.write_text("max\n")
    limited.write_text("4096\n")
    monkeypatch.setattr(memory, "CONTAINER_LIMITS", (unlimited, tmp_path / "absent", limited))
    assert memory.host_memory() == 4096


def test_an_engine_with_weights_of_its_own_has_less_for_keys_and_values():
    module = torch.nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
    limits = EngineLimits(max_cache_bytes=1000)
    assert memory.beside_weights(limits, module).max_cache_bytes == 1000 - 64


def test_weights_that_leave_nothing_are_refused_when_the_cache_is_built():
    module = torch.nn.Linear(8, 4, bias=False)
    limits = memory.beside_weights(EngineLimits(max_cache_bytes=100), module)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization"):
        limits.num_slots(1024)
