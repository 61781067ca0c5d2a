"""A whole GRPO step on one GPU, by phase: generate, score, update.

    python benchmarks/gpu/grpo_step.py [--shape 0.5B] [--micro-tokens 32768] [--old-log-probs]

128 prompts of 256 tokens, 8 samples each, 512 tokens per sample (end-of-sequence is ignored), one
optimizer step on all of them. Rewards are random numbers: scoring costs nothing here.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).parent))
from decode import requests
from shapes import ceilings, random_model, workload_parser

from verl.algos.advantages.group_relative import compute_grpo_outcome_advantage
from verl.config.actor import FSDPActorConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.fuse import fuse_model
from verl.utils.flops_counter import FlopsCounter
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine


def as_rows(batch, outputs):
    """The columns of DESIGN's batch that an update reads; nothing is padded here."""
    prompts = torch.tensor([list(r.prompt_ids) for r in batch for _ in range(r.num_samples)])
    responses = torch.tensor([output.token_ids for group in outputs for output in group])
    log_probs = torch.tensor([output.log_probs for group in outputs for output in group])
    ids = torch.cat([prompts, responses], 1)
    return TensorDict(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(ids.shape[1]).expand_as(ids).contiguous(),
            "responses": responses,
            "response_mask": torch.ones_like(responses),
            "old_log_probs": log_probs,
        },
        batch_size=len(ids),
    ).to("cuda")


class Phases:
    """Seconds by phase; the device is idle at both ends of each."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def time(self, name, run):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = run()
        torch.cuda.synchronize()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result


def main() -> None:
    parser = workload_parser(__doc__.partition("\n")[0])
    parser.add_argument("--micro-tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--old-log-probs", action="store_true", help="a separate pass for them")
    parser.add_argument("--out", type=Path, default=Path("grpo_step.json"))
    options = parser.parse_args()
    fused: list[str] = []

    def build():
        model = random_model(options.shape)
        fused.extend(fuse_model(model))
        return model

    engine = OneDeviceEngine(build, FSDPOptimizerConfig(lr=1e-6))
    engine.initialize()
    actor = DataParallelPPOActor(
        FSDPActorConfig(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=options.micro_tokens),
        engine,
    )
    num_rows = options.prompts * options.samples
    rollout = NativeEngine(
        engine.module,
        EngineLimits(
            max_num_seqs=num_rows,
            max_prompt_tokens=options.prompt_tokens,
            max_response_tokens=options.new_tokens,
            max_prefill_tokens=16384,
            max_cache_bytes=60 << 30,
            steps_per_visit=16,
        ),
        eos_token_ids=[0],
        version=lambda: engine.policy_version,
    )
    sizes = (options.prompts, options.prompt_tokens, options.samples, options.new_tokens)
    micro = MicroBatching(tokens=options.micro_tokens)
    phases = Phases()
    groups = np.arange(num_rows) // options.samples

    def step(number):
        batch = requests(*sizes, seed=number)
        outputs = phases.time("generate", lambda: rollout.generate_batch(batch))
        rows = phases.time("pack", lambda: as_rows(batch, outputs))
        rollout.sleep()
        if options.old_log_probs:
            columns = phases.time(
                "old_log_probs",
                lambda: actor.compute_log_prob(rows, micro_batching=micro, temperature=1.0),
            )
            rows["old_log_probs"] = columns["log_probs"]
        rewards = torch.zeros_like(rows["old_log_probs"])
        rewards[:, -1] = torch.rand(num_rows, device="cuda")
        rows["advantages"], _ = compute_grpo_outcome_advantage(
            rewards, rows["response_mask"], groups
        )
        return phases.time(
            "update",
            lambda: actor.update_policy(
                rows,
                rows_per_step=num_rows,
                temperature=1.0,
                old_policy_version=engine.policy_version,
            ),
        )

    metrics = {}
    for number in range(options.steps):
        metrics = phases.time("step", lambda number=number: step(number))
    medians = {name: statistics.median(times[1:]) for name, times in phases.seconds.items()}
    lengths = [options.prompt_tokens + options.new_tokens] * num_rows
    result = {
        "shape": options.shape,
        "sizes": sizes,
        "fused": fused,
        "seconds": phases.seconds,
        "median_seconds": medians,
        "generated_tokens_per_second": num_rows * options.new_tokens / medians["generate"],
        "trained_tokens_per_second": sum(lengths) / medians["update"],
        "update_mfu": FlopsCounter(engine.module.config).utilisation(lengths, medians["update"]),
        "old_log_prob_error": metrics["actor/old_log_prob_error"],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "cache_gib": rollout.cache.shape.bytes_per_sequence * num_rows / 2**30,
        "ceilings": ceilings(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
    }
    print(json.dumps(result, indent=1))
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
