"""What the run page's record costs a step of the quickstart.

    python benchmarks/board_overhead.py [--steps 6] [--out benchmarks/results/board_overhead.json]

Trains the quickstart's model at the quickstart's sizes (64 prompts, 8 samples each) with
`trainer.board=True`. The overhead is the processor time of handing steps over and of the thread
that writes them, over the processor time of the whole process: what it would be on one core, where
the writer runs beside nothing. Processor time does not depend on what else the machine does.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl.board.live import RunBoard
from verl.board.reader import StoreReader
from verl.board.store import FILE_NAME, StoreWriter
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.trainer import PPOTrainer

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def timed(owner: type, name: str, clock: Any) -> list[float]:
    """Seconds of every call of a method, from now on."""
    seconds: list[float] = []
    method = vars(owner)[name]

    def run(*args: Any, **kwargs: Any) -> Any:
        start = clock()
        try:
            return method(*args, **kwargs)
        finally:
            seconds.append(clock() - start)

    setattr(owner, name, run)
    return seconds


def train(folder: Path, num_steps: int) -> None:
    for script, place in (("build_model.py", "model"), ("make_data.py", "data")):
        command = [sys.executable, str(QUICKSTART / script), "--out", str(folder / place)]
        subprocess.run([*command, "--seed", "0"], check=True, timeout=600)
    options = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "data/train.parquet",
        "data.val_files": "[]",
        "data.train_batch_size": 64,
        "data.max_prompt_length": 8,
        "data.max_response_length": 53,
        "custom_reward_function.path": QUICKSTART / "reward.py",
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{ACTOR}.ppo_mini_batch_size": 64,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 128,
        f"{ROLLOUT}.n": 8,
        f"{ROLLOUT}.max_num_seqs": 512,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 128,
        "trainer.total_training_steps": num_steps,
        "trainer.n_gpus_per_node": 1,
        "trainer.device": "cpu",
        "trainer.logger": "[]",
        "trainer.default_local_dir": folder / "run",
        "trainer.board": True,
    }
    run_ppo(OmegaConf.from_dotlist([f"{key}={value}" for key, value in options.items()]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    handed_over = timed(RunBoard, "add_step", time.thread_time)
    whole = timed(PPOTrainer, "train_step", time.process_time)
    written = timed(StoreWriter, "_write", time.thread_time)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(folder, options.steps)
        steps = StoreReader(folder / "run" / FILE_NAME).steps()[1:]  # the first opens the file
        size = (folder / "run" / FILE_NAME).stat().st_size
    step_seconds = sum(whole[1:]) / len(steps)
    found = {
        "step_cpu_seconds": step_seconds,
        "step_wall_seconds": sum(sum(entry["seconds"].values()) for entry in steps) / len(steps),
        "training_thread_seconds": sum(handed_over[1:]) / len(steps),
        "writer_cpu_seconds": sum(written[1:]) / len(steps),
        "megabytes_per_step": size / 1e6 / (len(steps) + 1),
    }
    cost = found["training_thread_seconds"] + found["writer_cpu_seconds"]
    found["overhead"] = cost / step_seconds
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
