"""The commands of docs/gsm8k.md on a real model, and what they reach.

    python examples/smollm2/prepare.py --out HOME/models/SmolLM2-135M-Instruct
    python examples/data_preprocess/gsm8k.py --local_save_dir HOME/data/gsm8k
    python -m benchmarks.gpu.gsm8k --home HOME --out results [--resume] [--timeout-seconds 590]
    python -m benchmarks.gpu.gsm8k --out FOLDER --draw benchmarks/results/gpu/gsm8k.json

The page's own commands run, with metrics in files: fine-tuning, then beside each other

    eval_sft          four sampled answers to each problem of the test set
    grpo, eval        training, validated greedily on the whole test set; then sampled answers
    ppo, eval_ppo     the same

When the time is over, training gets SIGTERM: it finishes its step and saves. With `--resume` the
same command goes on where that one ended, and what is done is not run again; without it everything
begins anew. Each part writes `<part>.json`, with its curve and what was wrong (`failure`), and all
of them stand in `page.json`. `--only` runs the named parts, one after the other.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
LANES = [["eval_sft"], ["grpo", "eval"], ["ppo", "eval_ppo"]]
"""What runs beside each other once the model is fine-tuned."""
FEW = ["data.train_batch_size=4", "trainer.total_training_steps=2", "trainer.test_freq=2"]
FEW_RL = [*FEW, "data.max_response_length=16", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
FEW_STEPS = {"sft": FEW, "grpo": FEW_RL, "ppo": FEW_RL}
"""With `--tiny`."""
SECONDS_TO_SAVE = 45
"""What is left of the time limit when training is asked to finish its step and save."""
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
    settings += FEW_STEPS.get(part, []) if options.tiny else []
    start, failure = time.monotonic(), None
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
                process = subprocess.Popen(
                    [
                        "bash",
                        "-c",
                        re.sub("^python ", f"exec {shlex.quote(sys.executable)} ", command),
                    ],
                    cwd=options.out,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=variables,
                )
                left = options.deadline - time.monotonic()
                if status := status_in_time(process, max(0.0, left)):
                    raise subprocess.CalledProcessError(status, command)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        failure = f"{type(error).__name__}: {text.read_text(errors='replace')[-2000:]}"
    before = options.out / f"{part}.json"
    if options.resume and before.exists():
        start -= json.loads(before.read_text())["seconds"]
    return {
        "part": part,
        "commands": to_run,
        "failure": failure,
        "printed": text.read_text(errors="replace")[-2000:] if part in EVALUATED else "",
        "seconds": round(time.monotonic() - start, 1),
        "steps": curve_of(log) if log.exists() else [],
    }


def status_in_time(process: subprocess.Popen[Any], seconds: float) -> int:
    """The exit status; one that takes longer is asked to end, and killed if it does not."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_SAVE)
        process.kill()
        process.wait(60)
        raise


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


def run_in_order(parts: list[str], options: argparse.Namespace) -> list[str]:
    """The parts that failed or were cut short; those behind the first of them wait for it."""
    for part in parts:
        result = options.out / f"{part}.json"
        if options.resume and not options.only and is_done(result):
            continue
        found = run(part, options)
        result.write_text(json.dumps(found, indent=1) + "\n")
        curve = [step["accuracy"] for step in found["steps"] if "accuracy" in step]
        print(f"{part}: {curve} {found['seconds']} s {found['failure'] or ''}", flush=True)
        if found["failure"]:
            return [part]
    return []


def is_done(result: Path) -> bool:
    return result.exists() and json.loads(result.read_text())["failure"] is None


def run_page(options: argparse.Namespace) -> list[str]:
    """Every part, as far as the time goes; those that are not done."""
    if failed := run_in_order(["sft"], options):
        return failed
    with ThreadPoolExecutor(len(LANES)) as pool:
        return [
            part
            for found in pool.map(partial(run_in_order, options=options), LANES)
            for part in found
        ]


def draw(numbers: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.5, 3.2), layout="constrained")
    (page,) = (run for run in json.loads(numbers.read_text())["runs"] if "parts" in run)
    for found in (found for found in page["parts"] if found["part"] in ("grpo", "ppo")):
        points = [(s["step"], 100 * s["accuracy"]) for s in found["steps"] if "accuracy" in s]
        axes.plot(*zip(*points, strict=True), marker=".", label=found["part"].upper())
    axes.set(xlabel="step", ylabel="GSM8K test set, greedy, percent", ylim=(0, None))
    axes.legend(fontsize=8)
    figure.savefig(picture, dpi=90)
    print(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--home", type=Path, help="has data/gsm8k and models/SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=[*PARTS, *EVALUATED], default=[])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--timeout-seconds", type=float, default=3600, help="of all parts")
    parser.add_argument("--resume", action="store_true", help="go on where an earlier call ended")
    parser.add_argument("--tiny", action="store_true", help="two steps of four prompts each")
    parser.add_argument("--draw", type=Path, metavar="NUMBERS")
    options = parser.parse_args()
    options.out = options.out.resolve()
    if options.draw:
        draw(options.draw, options.out / "gsm8k.png")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    options.home = options.home.resolve()
    options.deadline = time.monotonic() + options.timeout_seconds - SECONDS_TO_SAVE
    results = [options.out / f"{part}.json" for part in ("sft", *itertools.chain(*LANES))]
    if not options.resume and not options.only:
        for path in results:  # of an earlier call
            path.unlink(missing_ok=True)
    failed = run_in_order(options.only, options) if options.only else run_page(options)
    parts = [json.loads(path.read_text()) for path in results if path.exists()]
    (options.out / "page.json").write_text(json.dumps({"parts": parts}, indent=1) + "\n")
    if failed:
        sys.exit(f"not done: {', '.join(failed)}")


if __name__ == "__main__":
    main()
