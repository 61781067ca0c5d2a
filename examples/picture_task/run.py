"""A vision-language model learns to count squares by reinforcement, on CPU cores, in minutes.

    python examples/picture_task/run.py [--seed 0] [--out runs/picture_task]

Builds the model and its pictures, shows it a few demonstrations (`verl.trainer.sft_trainer`) and
trains it with GRPO (`verl.trainer.main_ppo`): once on the pictures, once with every picture moved
to another row, which must not help. Each command is printed before it runs.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(os.path.relpath(Path(__file__).parent))
ACCURACY = "val-core/squares/acc/mean@1"
DEADLINE_SECONDS = 3600


def call(folder: Path, name: str, arguments: list[str]) -> float:
    """Run one Python command to its end; its seconds."""
    print("$ " + shlex.join(["python", *arguments]), flush=True)
    log = folder / "logs" / f"{name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    metrics = folder / "metrics" / f"{name}.jsonl"
    metrics.parent.mkdir(parents=True, exist_ok=True)
    metrics.unlink(missing_ok=True)
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics)},
            timeout=DEADLINE_SECONDS,
            check=False,
        )
    if done.returncode:
        sys.exit(f"{log.read_text()[-5000:]}\n{name} ended with exit code {done.returncode}")
    return time.monotonic() - start


def trainer_options(folder: Path, name: str) -> dict[str, Any]:
    return {
        "trainer.n_gpus_per_node": 1,
        "trainer.device": "cpu",
        "trainer.logger": "[file]",
        "trainer.project_name": "picture_task",
        "trainer.experiment_name": name,
        "trainer.default_local_dir": folder / name,
        "trainer.resume_mode": "disable",
        "hydra.run.dir": folder / "hydra",
    }


def fine_tune(folder: Path, steps: int, seed: int) -> tuple[Path, float]:
    """A few demonstrations, so that answers are numbers; the folder of the new weights."""
    options = {
        "data.train_files": folder / "data" / "sft.parquet",
        "data.train_batch_size": 64,
        "data.max_length": 64,
        "model.path": folder / "model",
        "model.enable_gradient_checkpointing": False,
        "optim.lr": 2e-3,
        "trainer.total_training_steps": steps,
        "trainer.seed": seed,
        **trainer_options(folder, "sft"),
    }
    seconds = call(folder, "sft", ["-m", "verl.trainer.sft_trainer", *settings(options)])
    return folder / "sft" / f"global_step_{steps}" / "huggingface", seconds


def reinforce(folder: Path, model: Path, steps: int, seed: int, *, data: str, name: str) -> float:
    options = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "data" / f"train{data}.parquet",
        "data.val_files": folder / "data" / f"test{data}.parquet",
        "data.train_batch_size": 32,
        "data.max_prompt_length": 32,
        "data.max_response_length": 4,
        "data.seed": seed,
        "custom_reward_function.path": HERE / "reward.py",
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 256,
        "actor_rollout_ref.actor.optim.lr": 5e-4,
        "actor_rollout_ref.actor.optim.weight_decay": 0.0,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.rollout.max_num_seqs": 256,
        "trainer.total_training_steps": steps,
        "trainer.test_freq": 10,
        **trainer_options(folder, name),
    }
    return call(folder, name, ["-m", "verl.trainer.main_ppo", *settings(options)])


def settings(options: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in options.items()]


def curve(folder: Path, name: str) -> dict[int, float]:
    """Accuracy on held-out pictures by step."""
    lines = map(json.loads, (folder / "metrics" / f"{name}.jsonl").read_text().splitlines())
    return {one["step"]: one["data"][ACCURACY] for one in lines if ACCURACY in one["data"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/picture_task"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-steps", type=int, default=20)
    parser.add_argument("--grpo-steps", type=int, default=80)
    options = parser.parse_args()
    folder = options.out
    seed = ["--seed", str(options.seed)]
    call(folder, "build", [str(HERE / "build.py"), "--out", str(folder), *seed])
    model, sft_seconds = fine_tune(folder, options.sft_steps, options.seed)
    results: dict[str, Any] = {"sft_seconds": round(sft_seconds)}
    for name, data in (("grpo", ""), ("grpo_shuffled", "_shuffled")):
        seconds = reinforce(folder, model, options.grpo_steps, options.seed, data=data, name=name)
        results[name] = {"seconds": round(seconds), "accuracy": curve(folder, name)}
        print(f"{name}: {results[name]}", flush=True)
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
