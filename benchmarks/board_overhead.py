"""What the run page's record costs a step of the quickstart.

    python -m benchmarks.board_overhead [--steps 6] [--out benchmarks/results/board_overhead.json]
    python -m benchmarks.board_overhead --device cuda --steps 12 --rounds 3 [--out FILE]

Trains the quickstart's model at the quickstart's sizes (64 prompts, 8 samples each) with
`trainer.board=True`. The overhead is the processor time of handing steps over and of the thread
that writes them, over the processor time of the whole process: what it would be on one core, where
the writer runs beside nothing. Processor time does not depend on what else the machine does.

On a GPU the writer runs while the device works, and its processor time says little. There `rounds`
pairs of runs, without a record and with one, tell how much longer the median step takes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.gpu.measuring import environment
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


def prepare(folder: Path) -> None:
    for script, place in (("build_model.py", "model"), ("make_data.py", "data")):
        command = [sys.executable, str(QUICKSTART / script), "--out", str(folder / place)]
        subprocess.run([*command, "--seed", "0"], check=True, timeout=600)


def train(
    folder: Path, num_steps: int, options: argparse.Namespace, *, is_recorded: bool, run: str
) -> None:
    settings = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "data/train.parquet",
        "data.val_files": "[]",
        "data.train_batch_size": options.prompts,
        "data.max_prompt_length": 8,
        "data.max_response_length": 53,
        "custom_reward_function.path": QUICKSTART / "reward.py",
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{ACTOR}.ppo_mini_batch_size": options.prompts,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 128,
        f"{ROLLOUT}.n": 8,
        f"{ROLLOUT}.max_num_seqs": 512,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 128,
        "trainer.total_training_steps": num_steps,
        "trainer.n_gpus_per_node": 1,
        "trainer.device": options.device,
        "trainer.logger": "[]",
        "trainer.default_local_dir": folder / run,
        "trainer.board": is_recorded,
    }
    run_ppo(OmegaConf.from_dotlist([f"{key}={value}" for key, value in settings.items()]))


def compare(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Median wall seconds of a step without a record and with one, in turns."""
    walls: dict[bool, list[float]] = {False: [], True: []}
    steps = timed(PPOTrainer, "train_step", time.perf_counter)
    train(folder, 2, options, is_recorded=False, run="warm-up")
    for number in range(options.rounds):
        for is_recorded in (False, True) if number % 2 == 0 else (True, False):
            steps.clear()
            name = f"run-{number}-{is_recorded}"
            train(folder, options.steps, options, is_recorded=is_recorded, run=name)
            walls[is_recorded] += steps[2:]  # the first ones capture graphs
    without, recorded = (statistics.median(walls[kind]) for kind in (False, True))
    return {
        "step_wall_seconds": without,
        "step_wall_seconds_recorded": recorded,
        "overhead": recorded / without - 1,
        "num_steps": len(walls[True]),
    }


def measure(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Processor seconds of a step and of its record."""
    handed_over = timed(RunBoard, "add_step", time.thread_time)
    whole = timed(PPOTrainer, "train_step", time.process_time)
    written = timed(StoreWriter, "_write", time.thread_time)
    train(folder, options.steps, options, is_recorded=True, run="run")
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
    return {**found, "overhead": cost / step_seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=0, help="pairs of runs to compare instead")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        found: dict[str, Any] = (compare if options.rounds else measure)(Path(name), options)
    found["environment"] = environment(options.device, 0)
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
