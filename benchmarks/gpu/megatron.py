"""Training with megatron-core beside our own engine, on one device.

    python -m benchmarks.gpu.megatron --out megatron.json [--shape 0.5B] [--recompute]

Both have the same weights and the same packed rows, in groups with one prompt as in GRPO, each
prompt computed for every row (`whole` of `train.py`): Megatron's engine shares no prefixes. Our own
engine, which does by default, is there a third time with that. An engine is built, warmed up,
measured and freed before the next one, so peaks of memory are its own. The first loss of each
engine shows that they compute the same.
"""

import argparse
import dataclasses
import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu.measuring import environment, write
from benchmarks.gpu.policy import whole_groups
from benchmarks.gpu.shapes import model_config, number_format, random_model
from benchmarks.gpu.train import measure, random_rows
from benchmarks.gpu.workload import Workload, workload_parser
from verl.config.engine import McoreEngineConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.loading import random_causal_lm
from verl.workers.engine.megatron import load_library
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.stepping import SteppingEngine


def own_engine(options: argparse.Namespace, *, prefix_sharing: bool) -> SteppingEngine:
    return OneDeviceEngine(
        lambda: random_model(options.shape, options.device, options.seed),
        FSDPOptimizerConfig(lr=1e-6),
        gradient_checkpointing=options.recompute,
        prefix_sharing=prefix_sharing,
    )


def megatron_engine(options: argparse.Namespace) -> SteppingEngine:
    load_library()
    from verl.workers.engine.megatron.engine import MegatronEngine

    dtype = number_format(options.device)

    def build() -> Any:
        return random_model(options.shape, options.device, options.seed).cpu()

    def skeleton() -> Any:
        with torch.device("meta"):
            return random_causal_lm(model_config(options.shape), dtype=dtype)

    return MegatronEngine(
        build,
        FSDPOptimizerConfig(lr=1e-6),
        build_skeleton=skeleton,
        config=McoreEngineConfig(),
        compute_dtype=dtype,
        device=options.device,
        gradient_checkpointing=options.recompute,
    )


ENGINES: dict[str, Callable[[argparse.Namespace], SteppingEngine]] = {
    "own": lambda options: own_engine(options, prefix_sharing=False),
    "own, shared prompts": lambda options: own_engine(options, prefix_sharing=True),
    "megatron": megatron_engine,
}


def run(name: str, options: argparse.Namespace, work: Workload) -> dict[str, Any]:
    engine: Any = ENGINES[name](options)
    engine.initialize()
    vocabulary = engine.module.config.vocab_size
    rows = random_rows(work, vocabulary, options.seed).to(options.device)
    passes = whole_groups(work, options.micro_tokens)
    log_probs = engine.infer_batch(rows, micro_batching=passes)["log_probs"].float()
    phases = [measure(engine, rows, passes) for _ in range(options.rounds + 1)][1:]
    seconds = {
        phase: statistics.median(one.seconds[phase] for one in phases)
        for phase in phases[0].seconds
    }
    return {
        "mean_log_prob": float(log_probs.mean()),
        "median_seconds": seconds,
        "tokens_per_second": work.tokens / seconds["forward_backward"],
        "step_tokens_per_second": work.tokens / seconds["train"],
        "log_probs_tokens_per_second": work.tokens / seconds["log_probs"],
        "peak_gib": phases[-1].peak_gib,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = workload_parser(__doc__.partition("\n")[0], prompts=16)
    parser.add_argument("--micro-tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recompute", action="store_true", help="activations computed again")
    options = parser.parse_args(arguments)
    work, engines = Workload.of(options), {}
    for name in ENGINES:
        engines[name] = run(name, options, work)
        gc.collect()
        if options.device != "cpu":
            torch.cuda.empty_cache()
    result = {
        "shape": options.shape,
        "workload": dataclasses.asdict(work),
        "micro_tokens": options.micro_tokens,
        "recompute": options.recompute,
        "engines": engines,
        "environment": environment(options.device, options.seed),
    }
    write(options.out, result)
    for name, found in engines.items():
        peak = max(found["peak_gib"].values(), default=0.0)
        print(
            f"{name:20s} {found['step_tokens_per_second']:12,.0f} tokens/s in a step, "
            f"{found['log_probs_tokens_per_second']:12,.0f} to score, peak {peak:.1f} GiB"
        )


if __name__ == "__main__":
    main()
