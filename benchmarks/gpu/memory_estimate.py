"""How far the memory estimate of `trainer.dry_run` is from what one GPU really holds.

    python -m benchmarks.gpu.memory_estimate --out memory.json [--cases 0.5B 1.5B 7B-lora]

For each case the plan of a run on one device is computed from the model's shape and the run's
options; then the same model with random weights makes training steps, scoring passes and a
generation with these options. `estimate` and `measured` are GiB of a phase: at rest, generating
(keys and values included), scoring and updating, as torch's allocator counts them, and the cache.
"""

import argparse
import gc
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.gpu.measuring import GIB, environment, peak_gib, write
from benchmarks.gpu.shapes import model_config, random_model
from benchmarks.gpu.train import random_rows
from benchmarks.gpu.workload import Workload, requests
from verl.config.load import load_config
from verl.config.optimizer import FSDPOptimizerConfig
from verl.config.ppo import PPOConfig
from verl.config.schema import nested
from verl.models.lora import LoraOptions, add_lora
from verl.trainer.plan.memory import memory_plan
from verl.workers.engine.base import Columns
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine
from verl.workers.schedule import MicroBatching

A, R, M = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
CASES: dict[str, dict[str, Any]] = {
    "tiny": {"shape": "tiny", "lora": 0, "tokens": 256},
    "tiny-lora": {"shape": "tiny", "lora": 4, "tokens": 256},
    "0.5B": {"shape": "0.5B", "lora": 0, "tokens": 16384},
    "1.5B": {"shape": "1.5B", "lora": 0, "tokens": 16384},
    "7B-lora": {"shape": "7B", "lora": 32, "tokens": 16384},
}
LORA_ALPHA = 32
PREFILL_TOKENS = 16384


def estimate(case: dict[str, Any], work: Workload, device: str) -> dict[str, float]:
    """GiB of each phase of the plan."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model_config(case["shape"]).to_dict()))
        values = {
            "algorithm.adv_estimator": "grpo",
            "data.train_batch_size": work.prompts,
            "data.max_prompt_length": work.prompt_tokens,
            "data.max_response_length": work.new_tokens,
            "trainer.n_gpus_per_node": 1,
            "trainer.device": device,
            f"{A}.ppo_mini_batch_size": work.prompts,
            f"{A}.use_dynamic_bsz": True,
            f"{A}.ppo_max_token_len_per_gpu": case["tokens"],
            f"{R}.log_prob_use_dynamic_bsz": True,
            f"{R}.log_prob_max_token_len_per_gpu": case["tokens"],
            f"{R}.max_num_seqs": work.sequences,
            f"{R}.max_num_batched_tokens": PREFILL_TOKENS,
            f"{R}.n": work.samples,
            f"{M}.path": folder,
            f"{M}.lora_rank": case["lora"],
            f"{M}.enable_gradient_checkpointing": True,
        }
        by_path = {tuple(key.split(".")): value for key, value in values.items()}
        loaded = load_config(nested(by_path), PPOConfig, overrides=[f"{key}=" for key in values])
        plan = memory_plan(loaded.checked())
    return {phase.name: phase.total / GIB for phase in plan.phases}


def measured(case: dict[str, Any], work: Workload, device: str) -> dict[str, float]:
    def build() -> Any:
        model = random_model(case["shape"], device)
        if case["lora"]:
            add_lora(model, LoraOptions(rank=case["lora"], alpha=LORA_ALPHA))
        return model

    def loss(columns: Columns, rows: TensorDict) -> tuple[Tensor, dict[str, Any]]:
        return -(columns["log_probs"] * rows["advantages"]).mean(), {}

    engine = OneDeviceEngine(build, FSDPOptimizerConfig(lr=1e-6), gradient_checkpointing=True)
    engine.initialize()
    rows = random_rows(work, engine.module.config.vocab_size)
    cut = MicroBatching(tokens=case["tokens"])
    found: dict[str, float] = {}
    engine.train_batch(rows, loss, micro_batching=cut)  # the optimizer makes its state
    found["load"] = allocated(device)
    reset(device)
    engine.train_batch(rows, loss, micro_batching=cut)
    found["update actor"] = peak_gib(device)
    reset(device)
    engine.infer_batch(rows, micro_batching=cut)
    found["log-prob"] = peak_gib(device)
    reset(device)
    rollout = NativeEngine(
        engine.module,
        EngineLimits(
            max_num_seqs=work.sequences,
            max_prompt_tokens=work.prompt_tokens,
            max_response_tokens=work.new_tokens,
            max_prefill_tokens=PREFILL_TOKENS,
            max_cache_bytes=80 << 30,
            tokens_per_step=8,
        ),
        eos_token_ids=[0],
    )
    rollout.generate_batch(requests(work, engine.module.config.vocab_size, 1))
    cache = rollout.core.cache
    found["rollout"] = peak_gib(device) + cache.num_bytes / GIB
    rollout.sleep()
    return found


def allocated(device: str) -> float:
    return 0.0 if device == "cpu" else torch.cuda.memory_allocated() / GIB


def reset(device: str) -> None:
    gc.collect()  # a model and its engine refer to each other
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["0.5B", "1.5B", "7B-lora"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=512)
    options = parser.parse_args(arguments)
    work = Workload(options.prompts, options.samples, options.prompt_tokens, options.new_tokens)
    result: dict[str, Any] = {"environment": environment(options.device, 0), "cases": {}}
    for name in options.cases:
        case = CASES[name]
        planned, found = estimate(case, work, options.device), measured(case, work, options.device)
        result["cases"][name] = {
            phase: {
                "estimate": planned[phase],
                "measured": found[phase],
                "error": planned[phase] / found[phase] - 1 if found[phase] else None,
            }
            for phase in found
        }
        write(options.out, result)
        reset(options.device)


if __name__ == "__main__":
    main()
