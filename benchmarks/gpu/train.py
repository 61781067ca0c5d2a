"""How fast one GPU trains: forward, backward and optimizer over packed sequences.

    python -m benchmarks.gpu.train --out train.json [--shape 0.5B]

Rows come in groups with one prompt, as in GRPO. Computing that prompt once per group (`shared`) and
once per row (`whole`) take turns on the same rows; tokens per second count all tokens of all rows
either way, utilisation counts the operations that were needed (`floors.py`).
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.gpu.floors import TRAINING_FORMULA, Counts, forward_flops, training_flops
from benchmarks.gpu.measuring import Phases, back_and_forth, ceilings, environment, write
from benchmarks.gpu.policy import (
    build_engine,
    share_prefixes,
    unpadded_rows,
    whole_groups,
)
from benchmarks.gpu.workload import Workload, workload_parser
from verl.utils.flops_counter import get_device_flops
from verl.workers.engine.base import Columns
from verl.workers.engine.one_device import OneDeviceEngine

VARIANTS = {"shared": True, "whole": False}


def random_rows(work: Workload, vocabulary: int, seed: int = 0) -> TensorDict:
    """Random tokens and advantages; the samples of a prompt lie side by side."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(10, vocabulary, shape, generator=generator)

    prompts = tokens(work.prompts, work.prompt_tokens).repeat_interleave(work.samples, 0)
    rows = unpadded_rows(prompts, tokens(work.sequences, work.new_tokens))
    rows["advantages"] = torch.randn(work.sequences, work.new_tokens, generator=generator)
    return rows


def measure(engine: OneDeviceEngine, rows: TensorDict, passes: list[list[int]]) -> Phases:
    """One optimizer step and one inference for log-probabilities."""
    phases = Phases(engine.device.type)

    def loss(columns: Columns, batch: TensorDict) -> tuple[Tensor, dict[str, Any]]:
        return -(columns["log_probs"] * batch["advantages"]).sum() / rows["responses"].numel(), {}

    assert engine.optimizer is not None
    own_step = engine.optimizer.step
    engine.optimizer.step = phases.inside("optimizer", own_step)
    try:
        with phases.phase("train"):
            engine.train_batch(rows, loss, micro_batching=passes)
    finally:
        engine.optimizer.step = own_step
    with phases.phase("log_probs"):
        engine.infer_batch(rows, micro_batching=passes)
    phases.seconds["forward_backward"] = phases.seconds["train"] - phases.seconds["optimizer"]
    return phases


def summary(samples: list[dict[str, float]], counts: Counts, work: Workload, shares: bool) -> dict:
    seconds = {name: statistics.median(s[name] for s in samples) for name in samples[0]}
    peak = get_device_flops("")
    training = training_flops(counts, work, shares_prefix=shares)
    forward = forward_flops(counts, work, shares_prefix=shares)
    return {
        "median_seconds": seconds,
        "tokens_per_second": work.tokens / seconds["forward_backward"],
        "utilisation": training / seconds["forward_backward"] / peak,
        "utilisation_with_optimizer": training / seconds["train"] / peak,
        "log_probs_tokens_per_second": work.tokens / seconds["log_probs"],
        "log_probs_utilisation": forward / seconds["log_probs"] / peak,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = workload_parser(__doc__.partition("\n")[0], prompts=16)
    parser.add_argument("--micro-tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    work, engine = Workload.of(options), build_engine(options)
    config = engine.module.config
    rows = random_rows(work, config.vocab_size, options.seed).to(options.device)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    passes = whole_groups(work, options.micro_tokens)
    peaks: dict[str, dict[str, float]] = {}
    for name in back_and_forth(list(VARIANTS), options.rounds + 1):
        share_prefixes(engine, VARIANTS[name])
        phases = measure(engine, rows, passes)
        samples[name].append(phases.seconds)
        peaks[name] = phases.peak_gib
    counts = Counts.of(config)
    result = {
        "shape": options.shape,
        "workload": dataclasses.asdict(work),
        "micro_tokens": options.micro_tokens,
        "variants": {
            name: summary(found[1:], counts, work, VARIANTS[name]) | {"peak_gib": peaks[name]}
            for name, found in samples.items()
        },
        "samples": {name: found[1:] for name, found in samples.items()},
        "warm_up_seconds": {name: found[0] for name, found in samples.items()},
        "utilisation_formula": TRAINING_FORMULA,
        "ceilings": ceilings(options.device),
        "environment": environment(options.device, options.seed),
    }
    write(options.out, result)


if __name__ == "__main__":
    main()
