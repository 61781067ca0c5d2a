"""What the run page's record costs a step.

    python -m benchmarks.board_overhead [--steps 6] [--out benchmarks/results/board_overhead.json]
    python -m benchmarks.board_overhead --device cuda [--steps 41] [--large-steps 9] [--out FILE]

On a CPU: the quickstart's model at its sizes (64 prompts, 8 samples each) with
`trainer.board=True`. The overhead is the processor time of handing steps over, over that of the
whole training process; the process that writes is shown beside it. Processor time does not depend
on what else the machine does.

On a GPU (or with `--alternate`): every other step of a run is recorded. A cycle lasts from before
one hand-over to before the next, so what a record costs the step behind it counts too. The overhead
is the median difference between neighbours, over the median cycle without a record. Cases are the
quickstart and a random model of `--shape` with the usual workload of `benchmarks.gpu`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.gpu import trainer_step
from benchmarks.gpu.measuring import environment
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.workload import Workload, hf_tokenizer, vocabulary_of
from verl.board.live import RunBoard
from verl.board.reader import StoreReader
from verl.board.recorder import Recorder
from verl.board.store import FILE_NAME
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


def quickstart(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Settings of a run in `folder`."""
    prepare(folder)
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "data/train.parquet",
        "data.val_files": "[]",
        "data.train_batch_size": options.quickstart_prompts,
        "data.max_prompt_length": 8,
        "data.max_response_length": 53,
        "custom_reward_function.path": QUICKSTART / "reward.py",
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{ACTOR}.ppo_mini_batch_size": options.quickstart_prompts,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 128,
        f"{ROLLOUT}.n": 8,
        f"{ROLLOUT}.max_num_seqs": 512,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 128,
        "trainer.total_training_steps": options.steps,
        "trainer.n_gpus_per_node": 1,
        "trainer.device": options.device,
        "trainer.logger": "[]",
        "trainer.default_local_dir": folder / "run",
    }


def large(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Settings of a run in `folder` as `benchmarks.gpu.trainer_step` makes it."""
    own = argparse.Namespace(**{**vars(options), "steps": options.large_steps})
    work = Workload.of(own)
    trainer_step.write_model(folder / "model", own)
    hf_tokenizer(vocabulary_of(own.shape)).save_pretrained(folder / "tokenizer")
    trainer_step.write_prompts(folder / "prompts.parquet", work, own)
    settings = trainer_step.settings(folder, work, own)
    del settings["hydra.run.dir"]
    return {**settings, "trainer.logger": "[]", "trainer.default_local_dir": folder / "run"}


def train(settings: Mapping[str, Any]) -> StoreReader:
    """Make the run; the reader of its record, from which nothing was left out."""
    values = [f"{key}={value}" for key, value in settings.items()]
    run_ppo(OmegaConf.from_dotlist([*values, "trainer.board=true"]))
    reader = StoreReader(settings["trainer.default_local_dir"] / FILE_NAME)
    assert all(event["kind"] != "left out" for event in reader.events())
    return reader


# ---- every other step ----------------------------------------------------------------------------


@contextmanager
def every_other_step() -> Iterator[list[tuple[float, float | None]]]:
    """When each step was about to be handed over, and how long that took; None: not recorded."""
    marks: list[tuple[float, float | None]] = []
    record = RunBoard.add_step

    def add_step(board: RunBoard, number: int, *args: Any, **kwargs: Any) -> None:
        start, seconds = time.perf_counter(), None
        if number % 2:
            record(board, number, *args, **kwargs)
            seconds = time.perf_counter() - start
        marks.append((start, seconds))

    RunBoard.add_step = add_step
    try:
        yield marks
    finally:
        RunBoard.add_step = record


def compare(settings: Mapping[str, Any]) -> dict[str, float]:
    """Wall seconds of cycles that begin with a record and of those that do not."""
    with every_other_step() as marks:
        reader = train(settings)
    steps = [(end - start, took) for (start, took), (end, _) in pairwise(marks)]
    steps = steps[2:]  # the first ones open the record and capture graphs
    pairs = list(zip(steps[::2], steps[1::2], strict=False))
    differences = [recorded - without for (recorded, _), (without, _) in pairs]
    without = statistics.median(without for _, (without, _) in pairs)
    middle = statistics.median(differences)
    return {
        "cycle_seconds": without,
        "cycle_seconds_recorded": statistics.median(recorded for (recorded, _), _ in pairs),
        "median_difference_seconds": middle,
        "median_deviation_seconds": statistics.median(abs(d - middle) for d in differences),
        "hand_over_seconds": statistics.median(took for (_, took), _ in pairs if took is not None),
        "overhead": middle / without,
        "num_pairs": len(pairs),
        "trajectories": reader.samples()["count"] / len(reader.steps()),
    }


# ---- processor time ------------------------------------------------------------------------------


@contextmanager
def writer_marks() -> Iterator[list[float]]:
    """Processor seconds of the process that writes, before each step is handed over to it."""
    marks: list[float] = []
    record = Recorder.add_step

    def add_step(recorder: Recorder, *args: Any, **kwargs: Any) -> None:
        stat = Path(f"/proc/{recorder.process.pid}/stat").read_text().rpartition(")")[2].split()
        marks.append((int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"))
        record(recorder, *args, **kwargs)

    Recorder.add_step = add_step
    try:
        yield marks
    finally:
        Recorder.add_step = record


def measure(settings: Mapping[str, Any]) -> dict[str, float]:
    """Processor seconds of a step and of its record."""
    handed_over = timed(RunBoard, "add_step", time.thread_time)
    whole = timed(PPOTrainer, "train_step", time.process_time)
    with writer_marks() as marks:
        reader = train(settings)
    steps = reader.steps()[1:]  # the first opens the file
    step_seconds = sum(whole[1:]) / len(steps)
    trainer_seconds = sum(handed_over[1:]) / len(steps)
    writer_seconds = (marks[-1] - marks[1]) / (len(marks) - 2)  # the last is not written yet
    return {
        "step_cpu_seconds": step_seconds,
        "step_wall_seconds": sum(sum(entry["seconds"].values()) for entry in steps) / len(steps),
        "training_process_seconds": trainer_seconds,
        "writer_process_seconds": writer_seconds,
        "megabytes_per_step": reader.path.stat().st_size / 1e6 / (len(steps) + 1),
        "overhead": trainer_seconds / step_seconds,
        "overhead_with_writer": (trainer_seconds + writer_seconds) / step_seconds,
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--alternate", action="store_true", help="compare steps on a CPU, too")
    parser.add_argument("--steps", type=int, help="of the quickstart: 6, or 41 to compare")
    parser.add_argument("--quickstart-prompts", type=int, default=64)
    parser.add_argument("--large-steps", type=int, default=9)
    parser.add_argument("--shape", default="0.5B", choices=SHAPES)
    for field in fields(Workload):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=field.default)
    parser.add_argument("--micro-tokens", type=int, default=43008)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.alternate |= options.device != "cpu"
    options.steps = options.steps or (41 if options.alternate else 6)
    least = 5 if options.alternate else 3
    if min(options.steps, options.large_steps) < least:
        parser.error(f"{least} steps are the fewest that can be compared")
    return options


def main() -> None:
    options = parsed()
    with tempfile.TemporaryDirectory() as name:
        small, big = Path(name, "quickstart"), Path(name, options.shape)
        for folder in (small, big):
            folder.mkdir()
        if options.alternate:
            found: dict[str, Any] = {"quickstart": compare(quickstart(small, options))}
            found[options.shape] = compare(large(big, options))
        else:
            found = measure(quickstart(small, options))
    found["environment"] = environment(options.device, options.seed)
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
