"""The end of a decode step in one kernel, against the table's own plain torch."""

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.models.kernels.devices import on_each_device, on_each_dtype
from verl.workers.rollout.native.rows import RowTable


def random_table(num_rows, num_stops, device):
    generator = torch.Generator().manual_seed(0)
    table = RowTable.empty(num_rows, num_stops, torch.device("cpu"))
    table.num_tokens.random_(1, 4, generator=generator)
    table.token_limit.random_(2, 5, generator=generator)
    table.is_done.random_(0, 2, generator=generator)
    table.stop_ids.random_(-1, 9, generator=generator)
    on_device = RowTable.empty(num_rows, num_stops, torch.device(device))
    on_device[:] = table
    return on_device


@on_each_device
@pytest.mark.parametrize(("num_rows", "num_stops"), [(3, 0), (70, 1), (130, 3)])
def test_a_steps_end_is_that_of_plain_torch(device, num_rows, num_stops):
    from verl.models.kernels.row_steps import StepBlock, StepRows, end_step

    ours, theirs = (random_table(num_rows, num_stops, device) for _ in range(2))
    block = StepBlock(
        tokens=torch.full((3, num_rows + 2), -7, device=device),
        log_probs=torch.full((3, num_rows + 2), -7.0, device=device),
        num_steps=torch.zeros(num_rows, dtype=torch.long, device=device),
    )
    rows = StepRows(ours.newest, ours.num_tokens, ours.token_limit, ours.is_done, ours.stop_ids)
    drawn = torch.randint(0, 9, (2, num_rows), device=device)
    log_probs = torch.randn(2, num_rows, device=device)
    for step in range(2):
        end_step(drawn[step], log_probs[step], rows, block)
        theirs.advance(drawn[step])

    for name in ("newest", "num_tokens", "is_done", "token_limit", "stop_ids"):
        assert torch.equal(vars(ours)[name], vars(theirs)[name]), name
    assert 0 < ours.is_done.sum() <= num_rows
    assert torch.equal(block.tokens[:2, :num_rows], drawn)
    assert torch.equal(block.log_probs[:2, :num_rows], log_probs)
    assert (block.num_steps == 2).all()
    # The line after them and the columns of other rows are as they were.
    assert (block.tokens[2] == -7).all()
    assert (block.tokens[:, num_rows:] == -7).all()
    assert (block.log_probs[2] == -7).all()


@on_each_device
def test_a_step_without_a_line_left_is_not_kept_anywhere(device):
    from verl.models.kernels.row_steps import StepBlock, StepRows, end_step

    table = random_table(5, 1, device)
    kept = torch.full((2, 5), -7, device=device)  # the second line belongs to somebody else
    num_steps = torch.ones(5, dtype=torch.long, device=device)
    block = StepBlock(kept[:1], torch.zeros(1, 5, device=device), num_steps)
    rows = StepRows(
        table.newest, table.num_tokens, table.token_limit, table.is_done, table.stop_ids
    )
    end_step(
        torch.ones(5, dtype=torch.long, device=device), torch.zeros(5, device=device), rows, block
    )
    assert (kept == -7).all()
    assert (table.newest == 1).all()


@pytest.mark.gpu
def test_rows_one_token_before_their_end_are_never_done_too_early():
    from verl.models.kernels.row_steps import StepBlock, StepRows, end_step

    num_rows, device = 1024, "cuda"
    table = RowTable.empty(num_rows, 32, torch.device(device))
    table.stop_ids.fill_(-1)
    table.token_limit.fill_(512)
    tokens = torch.arange(num_rows, device=device)
    log_probs = torch.zeros(num_rows, device=device)
    block = StepBlock(
        torch.zeros(1, num_rows, dtype=torch.long, device=device),
        torch.zeros(1, num_rows, device=device),
        torch.zeros(num_rows, dtype=torch.long, device=device),
    )
    rows = StepRows(
        table.newest, table.num_tokens, table.token_limit, table.is_done, table.stop_ids
    )
    for _ in range(2000):  # threads that read what others write would differ from run to run
        table.num_tokens.fill_(510)
        end_step(tokens, log_probs, rows, block)
        assert not table.is_done.any()
        assert (table.num_tokens == 511).all()


IN_MACHINE_CODE = """
import sys, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class NoDevice:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(NoDevice())
launch = JITFunction.run

def compile_only(self, *args, grid, warmup, **options):
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    print(kernel.asm["ttgir"])

JITFunction.run = compile_only
from verl.models.kernels.row_steps import StepBlock, StepRows, end_step

def column(*shape):
    return torch.zeros(*shape, dtype=torch.long)

rows = StepRows(column(64), column(64), column(64), torch.zeros(64).bool(), column(64, 8))
block = StepBlock(column(2, 64), torch.zeros(2, 64), column(64))
end_step(column(64), torch.zeros(64), rows, block)
"""


def test_as_compiled_all_threads_have_read_before_one_writes():
    """The compiler may load a column once more for other threads; only its output shows that."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    found = subprocess.run(
        [sys.executable, "-c", IN_MACHINE_CODE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    steps = re.findall(r"tt\.load|tt\.store|gpu\.barrier", found.stdout)
    barrier = steps.index("gpu.barrier")
    assert {"tt.load"} == set(steps[:barrier])
    assert {"tt.store"} == set(steps[barrier + 1 :])


@on_each_device
@on_each_dtype
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (24, 40)])
def test_tokens_are_written_to_their_places_and_nowhere_else(device, dtype, key_dim, value_dim):
    from verl.models.kernels.row_steps import write_tokens

    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    num_tokens, num_copies, heads = 50, 45, 3
    key = numbers(heads, num_tokens, key_dim).transpose(0, 1)  # as models hand it over
    value = numbers(num_tokens, heads, value_dim)
    store = numbers(6, heads, 20, key_dim), numbers(6, heads, 20, value_dim)
    places = torch.randperm(6 * 20, generator=generator)[:num_copies]
    places[-3:] = places[-4]  # once more to the same place
    tokens = torch.randint(0, num_tokens, (num_copies,), generator=generator)
    tokens[-3:] = tokens[-4]
    token, slot, position = (x.to(device) for x in (tokens, places // 20, places % 20))
    expected = [slots.clone() for slots in store]
    for slots, new in zip(expected, (key, value), strict=True):
        slots[slot, :, position] = new[token]
    write_tokens(store, key, value, token, slot, position)
    for ours, theirs in zip(store, expected, strict=True):
        assert torch.equal(ours, theirs)
