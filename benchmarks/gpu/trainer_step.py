"""The step of the real command: what a user of `verl.trainer.main_ppo` waits for.

    python -m benchmarks.gpu.trainer_step --out trainer.json [--shape 0.5B] [--steps 4]

The same shape, prompts, lengths and reward as everywhere here, as a model folder, a parquet file
and a reward function. Beside `grpo_step` it has all that belongs to a run: agent loops, the reward
manager, checks, metrics and the log. Old log-probs are those of the rollout, so the work is that of
`trl_step`. Seconds are those that the trainer reports; the first step warms up and does not count.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.gpu.floors import TRAINING_FORMULA, Counts, training_flops
from benchmarks.gpu.measuring import environment, medians, write
from benchmarks.gpu.shapes import model_config, number_format
from benchmarks.gpu.workload import (
    Workload,
    hf_tokenizer,
    prompt_texts,
    reward,
    vocabulary_of,
    workload_parser,
)
from verl.utils.flops_counter import get_device_flops

NAME = "main_ppo"
ROOT = Path(__file__).resolve().parents[2]
PHASES = {"step": "step", "generate": "gen", "reward": "reward", "update": "update_actor"}
"""What the trainer calls them."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    return reward(solution_str)


def write_model(folder: Path, options: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(options.seed)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(
            model_config(options.shape), dtype=number_format(options.device)
        )
    model.save_pretrained(folder)


def write_prompts(path: Path, work: Workload, options: argparse.Namespace) -> None:
    """One batch of prompts per step."""
    texts = [
        text
        for step in range(options.steps)
        for text in prompt_texts(work, vocabulary_of(options.shape), options.seed + step)
    ]
    rows = [
        {"data_source": "digits", "prompt": text, "reward_model": {"ground_truth": ""}}
        for text in texts
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def settings(folder: Path, work: Workload, options: argparse.Namespace) -> dict[str, Any]:
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "prompts.parquet",
        "data.val_files": "[]",
        "data.train_batch_size": work.prompts,
        "data.max_prompt_length": work.prompt_tokens,
        "data.max_response_length": work.new_tokens,
        "data.shuffle": False,
        "custom_reward_function.path": Path(__file__).resolve(),
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.model.tokenizer_path": folder / "tokenizer",
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{actor}.ppo_mini_batch_size": work.prompts,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": options.micro_tokens,
        f"{actor}.use_rollout_log_probs": True,
        f"{actor}.optim.lr": 1e-6,
        f"{rollout}.n": work.samples,
        f"{rollout}.max_num_seqs": work.sequences,
        f"{rollout}.ignore_eos": True,
        "trainer.total_training_steps": options.steps,
        "trainer.val_before_train": False,
        "trainer.save_freq": -1,
        "data.seed": options.seed,
        "trainer.n_gpus_per_node": 1,
        "trainer.device": options.device,
        "trainer.logger": "[file]",
        "trainer.default_local_dir": folder / "checkpoints",
        "hydra.run.dir": folder / "hydra",
    }


def train(folder: Path, work: Workload, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The metrics of every step."""
    metrics = folder / "metrics.jsonl"
    changes = [f"{key}={value}" for key, value in settings(folder, work, options).items()]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *changes],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "VERL_FILE_LOGGER_PATH": str(metrics)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=options.timeout,
    )
    if done.returncode:
        sys.exit(f"main_ppo ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return [json.loads(line)["data"] for line in metrics.read_text().splitlines()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = workload_parser(__doc__.partition("\n")[0])
    parser.add_argument("--micro-tokens", type=int, default=43008)
    parser.add_argument("--steps", type=int, default=4, help="the first does not count")
    parser.add_argument("--timeout", type=float, default=300.0)
    options = parser.parse_args(arguments)
    work = Workload.of(options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", options)
        # In a folder of its own: beside a model it would be read as the tokenizer of that family.
        hf_tokenizer(vocabulary_of(options.shape)).save_pretrained(folder / "tokenizer")
        write_prompts(folder / "prompts.parquet", work, options)
        steps = train(folder, work, options)
    samples = [
        {"seconds": {ours: step[f"timing_s/{its}"] for ours, its in PHASES.items()}}
        for step in steps
    ]
    seconds = medians(samples[1:], "seconds")
    flops = training_flops(Counts.of(model_config(options.shape)), work, shares_prefix=True)
    write(
        options.out,
        {
            "shape": options.shape,
            "workload": dataclasses.asdict(work),
            "micro_tokens": options.micro_tokens,
            "variants": {
                NAME: {
                    "median_seconds": seconds,
                    "peak_gib": max(step.get("perf/max_memory_allocated_gb", 0) for step in steps),
                    "utilisation": flops / seconds["update"] / get_device_flops(""),
                }
            },
            "samples": {NAME: samples[1:]},
            "warm_up_seconds": samples[0],
            "mean_response_tokens": [step["response_length/mean"] for step in steps],
            "gradient_norms": [step["actor/grad_norm"] for step in steps],
            "utilisation_formula": TRAINING_FORMULA,
            "environment": environment(options.device, options.seed),
        },
    )


if __name__ == "__main__":
    main()
