"""Watch a language model learn by reinforcement, on two CPU cores, with verl's real commands.

    python examples/quickstart/run.py [--seed 0] [--out runs/quickstart]

Builds a small model and its problems, fine-tunes the model with `verl.trainer.fsdp_sft_trainer`,
trains it with GRPO in `verl.trainer.main_ppo`, and shows what changed. Each command is printed
before it runs; what it writes goes to a log file, which is shown when it fails.
"""

import argparse
import ctypes
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from plot import curves, draw, read_metrics, text_chart

HERE = Path(os.path.relpath(Path(__file__).parent))
ACCURACY = "val-core/multiplication/reward/mean@1"
WORKED_OUT = "val-aux/multiplication/worked_out/mean@1"
DEADLINE_SECONDS = 3600
PAGE = "page.html"
USUAL_FOLDER = Path("runs/quickstart")
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How long each part takes; the defaults are those of the published curves."""

    seed: int = 0
    sft_steps: int = 300
    habit_steps: int = 60
    grpo_steps: int = 25
    prompts_per_step: int = 64


class Run:
    """The folder of one run, and the commands that fill it."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder = folder
        self.recipe = recipe
        self.seconds: dict[str, dict[str, float]] = {}
        self.commands: list[str] = []

    def build(self) -> None:
        seed = ["--seed", str(self.recipe.seed)]
        self.call("model", [str(HERE / "build_model.py"), "--out", self.path("model"), *seed])
        self.call("data", [str(HERE / "make_data.py"), "--out", self.path("data"), *seed])

    def fine_tune(self) -> str:
        """Supervised training: the skill, then the habit; gives the folder of the new weights."""
        model = self._fine_tune(
            "skill", self.path("model"), "sft_worked_out", self.recipe.sft_steps, lr=3e-3
        )
        return self._fine_tune("habit", model, "sft_mixed", self.recipe.habit_steps, lr=1e-3)

    def _fine_tune(self, name: str, model: str, data: str, steps: int, lr: float) -> str:
        options = {
            "data.train_files": self.path(f"data/{data}.parquet"),
            "data.val_files": self.path("data/sft_test.parquet"),
            "data.prompt_key": "prompt",
            "data.response_key": "response",
            "data.train_batch_size": 64,
            "data.micro_batch_size_per_gpu": 64,
            "data.max_length": 64,
            "model.partial_pretrain": model,
            "model.enable_gradient_checkpointing": False,
            "optim.lr": lr,
            "optim.betas": "[0.9,0.98]",
            "optim.lr_warmup_steps": 20,
            "optim.min_lr_ratio": 0.1,
            "trainer.total_training_steps": steps,
            "trainer.seed": self.recipe.seed,
            **self.trainer_options(name),
        }
        self.train("verl.trainer.fsdp_sft_trainer", name, options, steps)
        return self.path(f"{name}/global_step_{steps}/huggingface")

    def reinforce(self, model: str) -> str:
        """GRPO with the reward in reward.py; gives the folder of the new weights."""
        recipe, name = self.recipe, "grpo"
        prompts = recipe.prompts_per_step
        options = {
            "algorithm.adv_estimator": "grpo",
            "data.train_files": self.path("data/train.parquet"),
            "data.val_files": self.path("data/test.parquet"),
            "data.train_batch_size": prompts,
            "data.max_prompt_length": 8,
            "data.max_response_length": 53,
            "data.seed": recipe.seed,
            "custom_reward_function.path": str(HERE / "reward.py"),
            "actor_rollout_ref.model.path": model,
            "actor_rollout_ref.model.enable_gradient_checkpointing": False,
            "actor_rollout_ref.actor.ppo_mini_batch_size": prompts,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 128,
            "actor_rollout_ref.actor.clip_ratio_high": 0.28,
            "actor_rollout_ref.actor.optim.lr": 2e-4,
            "actor_rollout_ref.actor.optim.lr_warmup_steps": 5,
            "actor_rollout_ref.actor.optim.betas": "[0.9,0.99]",
            "actor_rollout_ref.actor.optim.weight_decay": 0.0,
            "actor_rollout_ref.rollout.n": 8,
            "actor_rollout_ref.rollout.max_num_seqs": 512,
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 128,
            "trainer.total_training_steps": recipe.grpo_steps,
            "trainer.test_freq": 5,
            "trainer.save_freq": recipe.grpo_steps,
            "trainer.validation_data_dir": self.path("transcripts"),
            "trainer.board": True,
            **self.trainer_options(name),
        }
        self.train("verl.trainer.main_ppo", name, options, recipe.grpo_steps)
        return self.path(f"{name}/global_step_{recipe.grpo_steps}/actor/huggingface")

    def trainer_options(self, name: str) -> dict[str, Any]:
        return {
            "trainer.n_gpus_per_node": 1,
            "trainer.device": "cpu",
            "trainer.logger": "[file]",
            "trainer.project_name": "quickstart",
            "trainer.experiment_name": name,
            "trainer.default_local_dir": self.path(name),
            "hydra.run.dir": self.path("hydra"),
        }

    def train(self, module: str, name: str, options: dict[str, Any], steps: int) -> None:
        settings = [f"{key}={value}" for key, value in options.items()]
        self.call(name, ["-m", module, *settings], steps)

    def call(self, name: str, arguments: list[str], steps: int = 0) -> None:
        """Run one Python command to its end, showing its progress."""
        self.commands.append(shlex.join(["python", *arguments]))
        print(f"\n$ {wrapped(['python', *arguments])}", flush=True)
        metrics, log = Path(self.path(f"metrics/{name}.jsonl")), Path(self.path(f"logs/{name}.txt"))
        log.parent.mkdir(parents=True, exist_ok=True)
        start, cpu_start = time.monotonic(), cpu_seconds()
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics)},
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
            try:
                follow(process, metrics, steps, start)
            finally:
                process.kill()
                process.wait(timeout=60)
        wall, cpu = time.monotonic() - start, cpu_seconds() - cpu_start
        self.seconds[name] = {"wall": round(wall, 1), "cpu": round(cpu, 1)}
        if process.returncode:
            sys.exit(f"{log.read_text()}\n{name} ended with exit code {process.returncode}")
        print(f"  done in {wall:.0f} s", flush=True)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def results(self) -> dict[str, Any]:
        """What is published: curves, times and commands."""
        metrics = Path(self.path("metrics/grpo.jsonl"))
        return {
            "recipe": vars(self.recipe),
            **curves(metrics, ACCURACY, worked_out=WORKED_OUT),
            "seconds": self.seconds,
            "commands": self.commands,
        }


def die_with_parent(parent: int) -> None:
    """Have the kernel (of Linux) kill this process when the one that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before we asked
            os._exit(1)


def cpu_seconds() -> float:
    """Processor time of all commands that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def wrapped(words: list[str], width: int = 100) -> str:
    """A command in lines that a shell reads as one."""
    lines = [""]
    for word in map(shlex.quote, words):
        if lines[-1] and len(lines[-1]) + len(word) > width - 6:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{word}"
    return " \\\n    ".join(lines)


def follow(process: subprocess.Popen[bytes], metrics: Path, steps: int, start: float) -> None:
    """Wait for the end of a command and show its metrics as they come."""
    shown, is_running = -1, True
    while is_running:
        time.sleep(0.2)
        is_running = process.poll() is None
        if time.monotonic() - start > DEADLINE_SECONDS:
            sys.exit(f"the command did not end within {DEADLINE_SECONDS} s")
        for step, data in read_metrics(metrics):
            is_supervised = "train/loss" in data
            if step > shown and (not is_supervised or step % 50 == 0 or step == steps):
                shown = step
                print(f"  {progress(step, data, steps)}", flush=True)


def progress(step: int, data: dict[str, Any], steps: int) -> str:
    """One line about one step."""
    parts = [f"step {step:3}/{steps}"]
    for label, name in (
        ("loss", "train/loss"),
        ("reward", "critic/score/mean"),
        ("length", "response_length/mean"),
        ("held-out accuracy", ACCURACY),
    ):
        if name in data:
            parts.append(f"{label} {data[name]:.3g}")
    return "  ".join(parts)


def transcripts(folder: Path, steps: list[int], count: int = 3) -> str:
    """The same problems, answered before and after."""
    answers = [
        [json.loads(line) for line in (folder / f"{step}.jsonl").read_text().splitlines()]
        for step in steps
    ]
    lines = []
    for first in answers[0][:count]:
        last = next(row for row in answers[1] if row["input"] == first["input"])
        lines.append(f"\n{first['input']}   (right: {first['gts']})")
        for when, row in ("before", first), ("after", last):
            mark = "right" if row["score"] > 0 else "wrong"
            lines.append(f"  {when:7}{row['output']!r}  {mark}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=USUAL_FOLDER)
    for name, default in vars(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    arguments = vars(parser.parse_args())
    folder = arguments.pop("out")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    remove_earlier_run(folder)
    start = time.monotonic()
    run = Run(folder, Recipe(**arguments))
    run.build()
    model = run.reinforce(run.fine_tune())
    run.call("page", ["-m", "verl.board", run.path("grpo"), "--export", run.path(PAGE)])
    results = run.results()
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    report(results, folder, model, time.monotonic() - start)


def remove_earlier_run(folder: Path) -> None:
    """Make room for a new run, but never delete what is not one of ours."""
    if folder.exists():
        if not (folder / "logs" / "model.txt").exists():
            sys.exit(f"{folder} exists and is not an earlier run; choose another --out")
        shutil.rmtree(folder)


def report(results: dict[str, Any], folder: Path, model: str, seconds: float) -> None:
    first, last = results["validation"][0], results["validation"][-1]
    print(transcripts(folder / "transcripts", [first["step"], last["step"]]))
    print(f"\n{text_chart(results)}")
    picture = draw([results], folder / "curve.png")
    print(
        f"\nheld-out accuracy {first['accuracy']:.0%} -> {last['accuracy']:.0%}, "
        f"worked out {first['worked_out']:.0%} -> {last['worked_out']:.0%}, in {seconds:.0f} s"
        f"\ncurve     {picture}\nnumbers   {folder / 'results.json'}\nmodel     {model}"
        f"\nask it    python {HERE / 'ask.py'} {model} '5071*4'"
        f"\nchat      {serve_command(folder, model)}   (in the browser)"
        f"\nrun page  {(folder / PAGE).resolve().as_uri()}   (every step, sample and token)"
    )


def serve_command(folder: Path, model: str) -> str:
    """`make serve` finds the model of a run in the usual folder by itself."""
    if Path("examples/quickstart") != HERE:  # somewhere else there is no Makefile
        return f"verl serve actor_rollout_ref.model.path={shlex.quote(model)} trainer.device=cpu"
    return "make serve" if folder == USUAL_FOLDER else f"make serve MODEL={shlex.quote(model)}"


if __name__ == "__main__":
    main()
