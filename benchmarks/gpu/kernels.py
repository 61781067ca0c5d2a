"""Where the time of a training step goes: the seconds of every kernel, by what it is for.

    python -m benchmarks.gpu.kernels --out kernels.json [--shape 0.5B]

Whole passes of the size that a step has, prompts computed once per group, on random rows. One step
is recorded after two that warm up. Products are set beside the ceiling that the process measured:
what they take at that speed no kernel of ours can save.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.floors import Counts
from benchmarks.gpu.measuring import ceilings, environment, synchronize, write
from benchmarks.gpu.policy import build_engine, share_prefixes, whole_groups
from benchmarks.gpu.train import random_rows
from benchmarks.gpu.workload import Workload, workload_parser
from verl.workers.engine.base import Columns
from verl.workers.engine.one_device import OneDeviceEngine

PURPOSES = {
    "products": ("nvjet", "gemm", "cutlass", "splitk", "aten::mm", "aten::addmm"),
    "attention": ("_packed_attention", "_query_gradient", "_key_gradients"),
    "gates": ("_gate_forward", "_gate_backward"),
    "log-probs": ("_block_statistics", "_finish_rows", "_overwrite_with_gradient"),
    "norms and rotary embedding": ("_norm_forward", "_norm_backward", "_rotate"),
    "optimizer": ("multi_tensor_apply",),
}
"""By parts of their names, in small letters; what matches none is `other`."""


def purpose(kernel: str) -> str:
    name = kernel.lower()
    for purpose, parts in PURPOSES.items():
        if any(part in name for part in parts):
            return purpose
    return "other"


def step(engine: OneDeviceEngine, rows: TensorDict, passes: list[list[int]]) -> None:
    def loss(columns: Columns, batch: TensorDict) -> tuple[Tensor, dict[str, Any]]:
        return -(columns["log_probs"] * batch["advantages"]).sum() / rows["responses"].numel(), {}

    engine.train_batch(rows, loss, micro_batching=passes)
    synchronize(engine.device.type)


def recorded(run: Any, device: str) -> dict[str, tuple[int, float]]:
    """Calls and seconds by kernel; on a CPU, by operation, without those it calls."""
    on_gpu = device != "cpu"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        run()
    kernels: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in found.events():
        if on_gpu and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        own = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        calls, seconds = kernels[event.name]
        kernels[event.name] = calls + 1, seconds + own / 1e6
    return dict(kernels)


def product_flops(counts: Counts, work: Workload) -> float:
    """Of the layers' and the output layer's matrices, forward and backward."""
    tokens = work.prompts * work.prompt_tokens + work.sequences * work.new_tokens
    head_tokens = work.sequences * work.new_tokens
    return 6.0 * (counts.layer_weights * tokens + counts.head_weights * head_tokens)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = workload_parser(__doc__.partition("\n")[0], prompts=14)
    parser.add_argument("--micro-tokens", type=int, default=43008)
    options = parser.parse_args(arguments)
    work, engine = Workload.of(options), build_engine(options)
    share_prefixes(engine, True)
    config = engine.module.config
    rows = random_rows(work, config.vocab_size, options.seed).to(options.device)
    passes = whole_groups(work, options.micro_tokens)
    for _ in range(2):
        step(engine, rows, passes)
    kernels = recorded(lambda: step(engine, rows, passes), options.device)
    seconds: dict[str, float] = dict.fromkeys([*PURPOSES, "other"], 0.0)
    for name, (_, own) in kernels.items():
        seconds[purpose(name)] += own
    flops = product_flops(Counts.of(config), work)
    result = {
        "shape": options.shape,
        "workload": dataclasses.asdict(work),
        "passes": len(passes),
        "seconds": seconds,
        "product_tflops": flops / max(seconds["products"], 1e-9) / 1e12,
        "kernels": {
            name: {"calls": calls, "seconds": own}
            for name, (calls, own) in sorted(kernels.items(), key=lambda item: -item[1][1])[:40]
        },
        "ceilings": ceilings(options.device),
        "environment": environment(options.device, options.seed),
    }
    write(options.out, result)


if __name__ == "__main__":
    main()
