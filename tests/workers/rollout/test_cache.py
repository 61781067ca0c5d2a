"""Slots where all fit, pages where they do not; how much memory the cache may take."""

import logging

import pytest
import torch

from tests.tiny_models import tiny_model
from verl.workers.rollout.native import cache
from verl.workers.rollout.native.cache import slots_or_pages, slots_that_fit
from verl.workers.rollout.native.model_runner import ModelRunner
from verl.workers.rollout.native.pages import PAGE
from verl.workers.rollout.native.sequence import EngineLimits

TOKEN_BYTES = 2 * 2 * 8 * 2 * 4  # layers, KV heads, head dim, keys and values, fp32


@pytest.fixture(scope="module")
def runner():
    return ModelRunner(tiny_model("llama"))


def limits(max_cache_bytes, **changes):
    sizes = {"max_num_seqs": 4, "max_prompt_tokens": 50, "max_response_tokens": 100}
    sizes |= {"max_session_bytes": 0, **changes}
    return EngineLimits(max_cache_bytes=max_cache_bytes, **sizes)


def fit(layout, runner, limits):
    return layout(runner.slot_shape(limits), limits)


def test_slots_are_used_if_as_many_fit_as_are_asked_for(runner):
    size = fit(slots_or_pages, runner, limits(4 * 150 * TOKEN_BYTES))
    assert (size.is_paged, size.num_slots, size.num_rows) == (False, 1 + 4, 4)
    assert (size.shape.max_prompt_tokens, size.shape.max_response_tokens) == (50, 100)


@pytest.mark.parametrize(
    ("num_tokens", "num_slots", "num_pages"), [(0, 0, 0), (450, 2, 7), (10**9, 16, 36)]
)
def test_sessions_get_slots_or_pages_of_their_own(runner, num_tokens, num_slots, num_pages):
    """One of the slots is nobody's, and there are at most four times those of running sequences."""
    for num_bytes, num_kept in ((0, num_slots), (-1, num_pages)):
        found = limits(
            4 * 150 * TOKEN_BYTES + num_bytes, max_session_bytes=num_tokens * TOKEN_BYTES
        )
        assert fit(slots_or_pages, runner, found).num_kept == num_kept


def test_with_a_byte_less_the_memory_is_cut_into_pages_and_that_is_said(runner, caplog):
    with caplog.at_level(logging.WARNING):
        size = fit(slots_or_pages, runner, limits(4 * 150 * TOKEN_BYTES - 1))
    assert (size.is_paged, size.num_slots, size.num_rows) == (True, 600 // PAGE, 4)
    assert size.shape.bytes_per_sequence == PAGE * TOKEN_BYTES
    (record,) = caplog.records
    assert "up to 4 sequences" in record.message
    assert f"{9 * PAGE} tokens" in record.message
    assert "enough for 3 at full length" in record.message


def test_without_pages_fewer_sequences_run_and_that_is_said(runner, caplog):
    with caplog.at_level(logging.WARNING):
        size = fit(slots_that_fit, runner, limits(4 * 150 * TOKEN_BYTES - 1))
    assert (size.is_paged, size.num_slots, size.num_rows) == (False, 3, 3)
    (record,) = caplog.records
    assert "3 sequences run at once instead of rollout.max_num_seqs=4" in record.message


@pytest.mark.parametrize("num_tokens", [149, 150, 255])
def test_a_sequence_that_could_not_finish_alone_is_refused(runner, num_tokens):
    """150 tokens take three pages, and one more is nobody's."""
    with pytest.raises(ValueError, match=r"rollout\.response_length.*gpu_memory_utilization"):
        fit(slots_or_pages, runner, limits(num_tokens * TOKEN_BYTES))


def test_four_pages_are_enough_for_a_sequence_of_three(runner):
    assert fit(slots_or_pages, runner, limits(256 * TOKEN_BYTES)).num_slots == 4


def test_the_budget_is_a_share_of_what_the_machine_has():
    cpu = torch.device("cpu")
    whole = cache.cache_budget(cpu, 1.0)
    assert 2**28 < whole < 2**48
    assert cache.cache_budget(cpu, 0.25) == whole // 4


def test_a_container_with_less_than_the_machine_counts(tmp_path, monkeypatch):
    unlimited, limited = tmp_path / "memory.max", tmp_path / "limit"
    unlimited.write_text("max\n")
    limited.write_text("4096\n")
    monkeypatch.setattr(cache, "CONTAINER_LIMITS", (unlimited, tmp_path / "absent", limited))
    assert cache.host_memory() == 4096


def test_an_engine_with_weights_of_its_own_has_less_for_keys_and_values():
    module = torch.nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
    limits = EngineLimits(max_cache_bytes=1000)
    assert cache.beside_weights(limits, module).max_cache_bytes == 1000 - 64


def test_weights_that_leave_nothing_are_refused_when_the_cache_is_built():
    module = torch.nn.Linear(8, 4, bias=False)
    limits = cache.beside_weights(EngineLimits(max_cache_bytes=100), module)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization"):
        limits.num_slots(1024)


class HostBytes:
    """What `SteadyMemory` gives, without a GPU."""

    def __init__(self, num_bytes, device):
        self.octets = torch.zeros(num_bytes, dtype=torch.uint8)

    def as_bytes(self):
        return self.octets

    def unmap(self):
        pass


def test_layers_of_a_steady_cache_share_all_of_its_memory_and_none_with_another(
    runner, monkeypatch
):
    monkeypatch.setattr(cache, "SteadyMemory", HostBytes)
    shape = fit(slots_or_pages, runner, limits(4 * 150 * TOKEN_BYTES)).shape
    steady = cache.SteadyKVCache(shape, 4)
    parts = [part for pair in (*steady.prompt, *steady.response) for part in pair]
    for number, part in enumerate(parts):
        part.fill_(number)
    assert [set(part.unique().tolist()) for part in parts] == [{n} for n in range(len(parts))]
    assert sum(part.nbytes for part in parts) == len(steady._memory.octets)
