"""Compile the attention kernels for a GPU that is not there, and say what shared memory they take.

    python -m tests.models.kernels.compile_for CAPABILITY ROOM HEAD_DIM DTYPE

Prints one line per kernel: its name and bytes. The kernels are launched as always, on tensors of
the CPU; Triton is told of another device and stops before the launch. That holds for the rest of
the process, so this is a program of its own.
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from verl.models.kernels import availability
from verl.models.kernels.decode_attention import SlotRows, slot_decode_attention
from verl.models.kernels.packed_attention import (
    Continuation,
    Tiles,
    packed_attention,
    tokens_per_tile,
)
from verl.models.kernels.packed_attention_backward import (
    WIDEST_HEAD,
    KeySpan,
    KeyTiles,
    packed_attention_backward,
)

HEADS, KV_HEADS, NUM_TOKENS = 8, 2, 128


class AbsentDevice:
    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_instead_of_launching():
    compile_or_launch = JITFunction.run

    def compile_and_print(self, *args, warmup, **options):
        kernel = compile_or_launch(self, *args, warmup=True, **options)
        print(self.fn.__name__, kernel.metadata.shared, flush=True)

    JITFunction.run = compile_and_print


def launch_packed(dim, dtype):
    query = torch.zeros(NUM_TOKENS, HEADS, dim, dtype=dtype)
    key = torch.zeros(NUM_TOKENS, KV_HEADS, dim, dtype=dtype)
    tiles = Tiles([Continuation(0, NUM_TOKENS)], tokens_per_tile(query, key), query.device)
    output, log_sum = packed_attention(query, key, key, tiles, scaling=1.0)
    if dim <= WIDEST_HEAD and dtype != torch.float32:  # else torch's own backward pass runs
        key_tiles = KeyTiles([KeySpan(0, NUM_TOKENS)], query.device)
        packed_attention_backward(
            output, query, key, key, output, log_sum, tiles, key_tiles, scaling=1.0
        )


def launch_decode(dim, dtype, *, is_paged):
    query = torch.zeros(4, HEADS, dim, dtype=dtype)
    key = torch.zeros(4, KV_HEADS, dim, dtype=dtype)
    store = (torch.zeros(4, KV_HEADS, 64, dim, dtype=dtype),) * 2
    column = torch.zeros(4, dtype=torch.int64)
    pages = torch.zeros(4, 4, dtype=torch.int32) if is_paged else None
    rows = SlotRows(column, column, column, column, pages)
    slot_decode_attention(query, key, key, store, store, rows, scaling=1.0)


def main(capability, room, dim, dtype):
    driver.set_active(AbsentDevice(int(capability)))
    availability.shared_memory_bytes = lambda device: int(room)
    compile_instead_of_launching()
    dim, dtype = int(dim), getattr(torch, dtype)
    launch_packed(dim, dtype)
    launch_decode(dim, dtype, is_paged=False)
    launch_decode(dim, dtype, is_paged=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
