"""One task, several programs: GRPO with ours, TRL and OpenRLHF, curves over each other.

    python3 -m venv build/trl-venv
    build/trl-venv/bin/pip install torch==2.13.0 && build/trl-venv/bin/pip install trl==1.16.0
    OMP_NUM_THREADS=1 python -m benchmarks.parity --out build/parity --trl build/trl-venv/bin/python

The toy of the tests (write as many sevens as you can, a model of 30,000 weights) on the CPU: the
same weights, prompts, seeds, and numbers of samples and updates. Settings are those of plain GRPO
(arXiv:2402.03300) without KL: token-mean loss, clip 0.2, AdamW with a constant rate, one update per
batch, temperature 1. Each program runs in a process of its own, TRL with the Python of an
environment of its own. A program that cannot run is named, with the reason, and left out. Results
are `curves.json` and `curves.png`.

OpenRLHF (0.11.2) does not run on a CPU, whatever is installed beside it: its ranks begin with
`torch.cuda.set_device`, which a torch without CUDA does not have. `--openrlhf` names its Python, so
that the kit says which of its requirements are missing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

PROMPTS, SAMPLES, LENGTH, RATE = 8, 8, 8, 0.005
TIMEOUT_SECONDS = 3600
Curve = list[float]


def run_verl(folder: Path, seed: int, steps: int) -> Curve:
    from tests.toy import ACTOR, ROLLOUT, toy_run

    steps_of, _ = toy_run(
        folder,
        folder / f"verl{seed}",
        f"data.train_batch_size={PROMPTS}",
        f"data.seed={seed}",
        f"{ROLLOUT}.n={SAMPLES}",
        f"{ACTOR}.ppo_mini_batch_size={PROMPTS}",
        f"{ACTOR}.optim.lr={RATE}",
        f"{ACTOR}.loss_agg_mode=token-mean",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
    )
    return [step["critic/score/mean"] for step in steps_of if "critic/score/mean" in step]


def run_trl(folder: Path, seed: int, steps: int) -> Curve:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    def sevens(completions: Sequence[str], **_: Any) -> list[float]:
        return [text.replace(" ", "").count("7") / LENGTH for text in completions]

    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    arguments = GRPOConfig(
        output_dir=str(folder / f"trl{seed}"),
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=LENGTH,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        temperature=1.0,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=seed,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
        reward_funcs=sevens,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
    )
    trainer.train()
    return [line["reward"] for line in trainer.state.log_history if "reward" in line]


RUNS: dict[str, Callable[[Path, int, int], Curve]] = {"verl": run_verl, "trl": run_trl}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trl", default=sys.executable, help="Python that has TRL")
    parser.add_argument("--openrlhf", default=sys.executable, help="Python that has OpenRLHF")
    parser.add_argument("--worker", nargs=3, metavar=("PROGRAM", "FOLDER", "SEED"))
    options = parser.parse_args(arguments)
    if options.worker:
        program, folder, seed = options.worker
        curve = RUNS[program](Path(folder), int(seed), options.steps)
        options.out.write_text(json.dumps(curve))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    curves = measure(options)
    (options.out / "curves.json").write_text(json.dumps(curves, indent=1))
    plot(curves, options.out / "curves.png")
    for program, found in curves.items():
        ends = [fmean(curve[-10:]) for curve in found["rewards"]]
        spread = stdev(ends) if len(ends) > 1 else 0.0
        seconds = fmean(found["seconds"])
        print(f"{program}: reward {fmean(ends):.3f} +- {spread:.3f}, {seconds:.1f} s a run")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Rewards per step and seconds, of each program and seed."""
    from tests.toy import make_toy

    curves: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = make_toy(Path(name))
        for program in programs_that_run(options):
            found = curves[program] = {"rewards": [], "seconds": []}
            for seed in range(1, options.seeds + 1):
                started = time.monotonic()
                found["rewards"].append(in_process(program, folder, seed, options))
                found["seconds"].append(time.monotonic() - started)
                print(f"{program}, seed {seed}: {found['seconds'][-1]:.1f} s", flush=True)
    return curves


def programs_that_run(options: argparse.Namespace) -> list[str]:
    """Ours, and those of the others that their environments can run; reasons are printed."""
    reasons = {
        "trl": missing_packages(options.trl, "trl", "datasets", "torch"),
        "openrlhf": missing_packages(
            options.openrlhf, "openrlhf", "flash_attn", "deepspeed", "vllm"
        ),
    }
    if not reasons["openrlhf"]:
        reasons["openrlhf"] = "its ranks call torch.cuda.set_device, and this kit is for the CPU"
    for program, reason in reasons.items():
        if reason:
            print(f"{program} is left out: {reason}", flush=True)
    return ["verl", *(program for program in RUNS if not reasons.get(program, "it is ours"))]


def missing_packages(python: str, *packages: str) -> str:
    """What an environment lacks, in words; "" if it has all of them."""
    lookup = (
        "import importlib.util as u, sys; print(*(p for p in sys.argv[1:] if not u.find_spec(p)))"
    )
    found = subprocess.run(
        [python, "-c", lookup, *packages], capture_output=True, text=True, timeout=60, check=True
    )
    missing = found.stdout.split()
    return f"not installed in the environment of {python}: {', '.join(missing)}" if missing else ""


def in_process(program: str, folder: Path, seed: int, options: argparse.Namespace) -> Curve:
    result = folder / "result.json"
    python = options.trl if program == "trl" else sys.executable
    words = ["--out", result, "--steps", options.steps, "--worker", program, folder, seed]
    done = subprocess.run(
        [python, "-m", "benchmarks.parity", *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{program} failed:\n{done.stderr[-3000:]}")
    return json.loads(result.read_text())


def plot(curves: dict[str, Any], path: Path) -> None:
    """The mean over the seeds, and the range from the lowest to the highest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for program, found in curves.items():
        columns = list(zip(*found["rewards"], strict=True))
        steps = range(1, len(columns) + 1)
        (line,) = axes.plot(steps, [fmean(column) for column in columns], label=program)
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="step", ylabel="mean reward of the step", ylim=(0, 1))
    seeds = len(next(iter(curves.values()))["seconds"])
    axes.set_title(f"GRPO on the toy task, {seeds} seeds: mean and range")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
