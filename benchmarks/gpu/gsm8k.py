"""The commands of docs/gsm8k.md on a real model, and what they reach.

    python examples/smollm2/prepare.py --out HOME/models/SmolLM2-135M-Instruct
    python examples/data_preprocess/gsm8k.py --local_save_dir HOME/data/gsm8k
    python -m benchmarks.gpu.gsm8k --home HOME --out results [--only sft grpo eval] [--resume]
    python -m benchmarks.gpu.gsm8k --out FOLDER --draw benchmarks/results/gpu/gsm8k.json

The page's own commands run, in its order, with metrics in files. `--only` takes some of its parts,
so that two of them may run beside each other; each writes `<part>.json`. One that fails or is cut
short does too: then `failure` says why, and the curve ends where it was. Accuracy of GRPO and PPO
is greedy, on all 1,319 problems of the test set; `eval` samples four answers to each problem from
the newest weights that GRPO has saved, `eval_sft` and `eval_ppo` from those before and of PPO. A
part begins anew, or with `--resume` at its last checkpoint (`--settings trainer.save_freq=20` makes
more of them); the curve is then of both runs.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/gsm8k.md"
ACCURACY, LOSS = "val-core/openai/gsm8k/acc/mean@1", "val/loss"
WANTED = {
    "accuracy": ACCURACY,
    "reward": "critic/score/mean",
    "response_tokens": "response_length/mean",
    "entropy": "actor/entropy",
    "seconds": "timing_s/step",
    "generation_seconds": "timing_s/gen",
    "update_seconds": "timing_s/update_actor",
    "loss": "train/loss",
    "val_loss": LOSS,
}
PARTS = {"sft": 2, "grpo": 1, "ppo": 1, "eval": 2}
"""How many of the page's commands belong to a part, after the one that makes the data."""
EVALUATED = {"eval": "grpo", "eval_sft": "sft", "eval_ppo": "ppo"}
"""Parts with the commands of `eval`, and whose weights they take."""
RUNS = Path("runs/gsm8k")
"""Below `--out`, as in the page's commands."""


def commands() -> dict[str, list[str]]:
    """The page's commands, by part; a shell finds the home folder and the newest weights."""
    blocks = iter(re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)[1:])
    return {part: [next(blocks).strip() for _ in range(count)] for part, count in PARTS.items()}


def run(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """One part of the page, in the results' folder; its commands, curve and time."""
    log = options.out / f"{part}.jsonl"
    if not options.resume:
        log.unlink(missing_ok=True)
        shutil.rmtree(options.out / RUNS / part, ignore_errors=True)  # or the run would resume
    if part in EVALUATED:
        to_run = evaluation(EVALUATED[part], options.out)
    else:
        to_run = commands()[part]
    settings = ["trainer.logger=[console,file]", f"trainer.device={options.device}"]
    settings += options.settings
    start, failure = time.perf_counter(), None
    variables = {
        **os.environ,
        "HOME": str(options.home),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "VERL_FILE_LOGGER_PATH": str(log),
    }
    text = options.out / f"{part}.txt"
    try:
        with text.open("w") as output:
            for command in to_run:
                if " -m verl.trainer." in command and part not in EVALUATED:
                    command = f"{command} {shlex.join(settings)}"
                left = options.timeout_seconds - (time.perf_counter() - start)
                subprocess.run(
                    [
                        "bash",
                        "-c",
                        re.sub("^python ", f"exec {shlex.quote(sys.executable)} ", command),
                    ],
                    check=True,
                    cwd=options.out,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=max(1.0, left),
                    env=variables,
                )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        failure = f"{type(error).__name__}: {text.read_text(errors='replace')[-2000:]}"
    return {
        "part": part,
        "commands": to_run,
        "settings": options.settings,
        "failure": failure,
        "printed": text.read_text(errors="replace")[-2000:] if part in EVALUATED else "",
        "seconds": round(time.perf_counter() - start, 1),
        "steps": curve_of(log) if log.exists() else [],
    }


def evaluation(trained: str, out: Path) -> list[str]:
    """The page's two commands for the newest weights of a part."""
    weights = RUNS / "sft/latest"
    if trained != "sft":
        saved = (out / RUNS / trained / "latest_checkpointed_iteration.txt").read_text().strip()
        weights = RUNS / trained / f"global_step_{saved}/actor/huggingface"
    return [
        re.sub(r"(?<=model\.path=)\S+", str(weights), line).replace(
            "answers.parquet", f"answers_{trained}.parquet"
        )
        for line in commands()["eval"]
    ]


def curve_of(log: Path) -> list[dict[str, float]]:
    """An entry per step; where a step was trained again after a cut, its newest numbers."""
    steps: dict[int, dict[str, float]] = {}
    for line in map(json.loads, log.read_text().splitlines()):
        entry = steps.setdefault(line["step"], {"step": line["step"]})
        entry |= {key: round(line["data"][m], 4) for key, m in WANTED.items() if m in line["data"]}
    return list(steps.values())


def draw(numbers: Path, picture: Path) -> None:
    """From what `all.py` has kept: of each part the run that came farthest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.5, 3.2), layout="constrained")
    runs = [run for run in json.loads(numbers.read_text())["runs"] if "part" in run]
    longest = {run["part"]: run for run in sorted(runs, key=lambda run: len(run["steps"]))}
    for part in (part for part in ("grpo", "ppo") if part in longest):
        steps = longest[part]["steps"]
        points = [(s["step"], 100 * s["accuracy"]) for s in steps if "accuracy" in s]
        axes.plot(*zip(*points, strict=True), marker=".", label=part.upper())
    axes.set(xlabel="step", ylabel="GSM8K test set, percent", ylim=(0, None))
    axes.legend(fontsize=8)
    figure.savefig(picture, dpi=90)
    print(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--home", type=Path, help="has data/gsm8k and models/SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=[*PARTS, *EVALUATED], default=list(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--timeout-seconds", type=float, default=1200)
    parser.add_argument("--resume", action="store_true", help="go on from checkpoints of the parts")
    parser.add_argument("--settings", nargs="*", default=[], help="more options of training")
    parser.add_argument("--draw", type=Path, metavar="NUMBERS")
    options = parser.parse_args()
    options.out = options.out.resolve()
    if options.draw:
        draw(options.draw, options.out / "gsm8k.png")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    options.home = options.home.resolve()
    for part in options.only:
        found = run(part, options)
        (options.out / f"{part}.json").write_text(json.dumps(found, indent=1) + "\n")
        curve = [step["accuracy"] for step in found["steps"] if "accuracy" in step]
        print(f"{part}: {curve} {found['seconds']} s", flush=True)
        if found["failure"]:
            sys.exit(found["failure"])


if __name__ == "__main__":
    main()
