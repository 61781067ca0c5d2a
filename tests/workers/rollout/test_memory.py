"""How much memory the cache may take."""

import torch

from verl.workers.rollout.native import memory


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
