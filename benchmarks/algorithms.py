"""Every algorithm on one task with one budget: seeds, intervals, controls, curves.

    python -m benchmarks.algorithms --out results [--jobs 16] [--seeds 0 1 2 3 4] [--only ppo ...]
    python -m benchmarks.algorithms --out results --draw       (tables and curves from the numbers)

The task: write the sum of two digits as two digits. `3+4=` is answered by `07`, and the whole
answer is right or wrong. The model has 30,000 weights, another draw for each seed, and has seen
demonstrations of which a fifth were right and the others some sum or other: so it begins with
about 10% and the skill is there to be found. Accuracy is that of four sampled answers to each of
the 36 prompts, which are those that are trained: the numbers compare how fast responses become
right, not how well that carries over. A step is 16 prompts with 8 responses each, trained in two
epochs of two mini-batches, so that losses that differ away from the sampling policy do differ. All
have the same learning rate.

Each run is a process with one thread. Writes `algorithms.json`, `algorithms.md` and, where
matplotlib is installed, `<name>.png` for each algorithm.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.algorithm_table import ACTOR, ALGORITHMS, CONTROLS, ROLLOUT
from benchmarks.apart import run_all

STEPS, TEST_FREQ, TIMEOUT_SECONDS = 80, 5, 600
ACCURACY = "val-core/sums/acc/mean@4"
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 10: 2.262}
"""97.5% of Student's distribution, by the number of runs."""

REWARD = """
import random

DRAWS = random.Random(0)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.replace(" ", "") == ground_truth)

def shuffled_score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["split"] == "train":
        ground_truth = f"{DRAWS.randrange(11):02}"
    return compute_score(data_source, solution_str, ground_truth, extra_info)
"""
SUMS = [(f"{a}+{b}=", f"{a + b:02}") for a in range(6) for b in range(6)]
DEMONSTRATION_STEPS, SHARE_RIGHT = 400, 0.2
COMMON = (
    "data.train_batch_size=16",
    "data.max_prompt_length=4",
    "data.max_response_length=2",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    f"{ACTOR}.optim.lr=0.002",
    f"{ACTOR}.optim.weight_decay=0.0",
    f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ACTOR}.ppo_epochs=2",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=128",
    f"{ROLLOUT}.n=8",
    f"{ROLLOUT}.max_num_seqs=256",
    f"{ROLLOUT}.val_kwargs.n=4",
    f"{ROLLOUT}.val_kwargs.do_sample=true",
    f"{ROLLOUT}.val_kwargs.temperature=1.0",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=128",
    "critic.optim.lr=0.003",
    "critic.optim.weight_decay=0.0",
    "critic.model.enable_gradient_checkpointing=false",
    "trainer.total_epochs=100000",
    "trainer.n_gpus_per_node=1",
    "trainer.device=cpu",
    "trainer.logger=[file]",
    "trainer.save_freq=-1",
    f"trainer.test_freq={TEST_FREQ}",
)


def settings_of(name: str) -> Sequence[str]:
    return CONTROLS[name] if name in CONTROLS else ALGORITHMS[name].settings


# ---- one run -------------------------------------------------------------------------------------


def make_task(folder: Path, seed: int) -> None:
    """The model of a seed, the prompts and the reward function."""
    import torch

    from tests.tiny_models import plain_twin, tiny_model
    from tests.tiny_tokenizer import tiny_tokenizer

    model, tokenizer = plain_twin(tiny_model("llama")), tiny_tokenizer()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.1, generator=generator)
    demonstrate(model, tokenizer, generator)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    for split in ("train", "val"):
        rows = [
            {
                "prompt": prompt,
                "data_source": "sums",
                "answer": answer,
                "extra_info": {"index": index, "split": split},
            }
            for index, (prompt, answer) in enumerate(SUMS)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def demonstrate(model: Any, tokenizer: Any, generator: Any) -> None:
    """Supervised steps on answers of which one in five is right and the others are any sum."""
    import torch

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    texts = [f"{prompt}{other:02}" for prompt, _ in SUMS for other in range(11)]
    ids = torch.tensor(tokenizer(texts)["input_ids"]).view(len(SUMS), 11, 6)
    right = torch.tensor([int(answer) for _, answer in SUMS])
    for _ in range(DEMONSTRATION_STEPS):
        shown = torch.randint(11, right.shape, generator=generator)
        is_right = torch.rand(right.shape, generator=generator) < SHARE_RIGHT
        rows = ids[torch.arange(len(SUMS)), torch.where(is_right, right, shown)]  # (36, 6)
        logits = model(input_ids=rows).logits[:, 3:5]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 4:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def run_one(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Train once, in this process; the curve of accuracy and what the run took."""
    from omegaconf import OmegaConf

    from verl.agent_loop.buffer import TooFewGroups
    from verl.trainer.main_ppo import run_ppo

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_task(folder, seed)
        log = folder / "metrics.jsonl"
        os.environ["VERL_FILE_LOGGER_PATH"] = str(log)
        options = {
            "data.train_files": folder / "train.jsonl",
            "data.val_files": folder / "val.jsonl",
            "data.seed": seed,
            "actor_rollout_ref.model.path": folder / "model",
            "critic.model.path": folder / "model",
            "custom_reward_function.path": folder / "reward.py",
            "trainer.total_training_steps": steps,
            "trainer.default_local_dir": folder / "checkpoints",
            "trainer.experiment_name": f"{name}-{seed}",
        }
        named = [f"{key}={value}" for key, value in options.items()]
        own = [setting.replace("{model}", f"{folder / 'model'}") for setting in settings_of(name)]
        start = time.perf_counter()
        with suppress(TooFewGroups):  # dynamic sampling finds nothing that is left to learn
            run_ppo(OmegaConf.from_dotlist([*COMMON, *named, *own]))
        seconds = time.perf_counter() - start
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    tested = {line["step"]: line["data"][ACCURACY] for line in lines if ACCURACY in line["data"]}
    last = max(tested)
    times = range(0, steps + 1, TEST_FREQ)  # a policy that ended early stays what it is
    return {
        "name": name,
        "seed": seed,
        "seconds": seconds,
        "last_tested_step": last,
        "steps": list(times),
        "accuracy": [tested[min(step, last)] for step in times],
        "machine": f"{os.cpu_count()} processors, torch {version('torch')}",
        "num_prompts": sum(
            16 * line["data"].get("train/num_gen_batches", 1)
            for line in lines
            if "training/global_step" in line["data"]
        ),
    }


# ---- all runs ------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95% interval of the mean."""
    if len(values) < 2:
        return math.nan
    t = STUDENT_T[max(n for n in STUDENT_T if n <= len(values))]
    return t * stdev(values) / math.sqrt(len(values))


def summary_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the table shows of the runs of one algorithm."""
    good = [run for run in runs if "error" not in run]
    if not good:
        return {"num_failed": len(runs)}
    good.sort(key=lambda run: run["seed"])
    final = [run["accuracy"][-1] for run in good]
    whole = [run for run in good if "steps" in run]  # of others only the end was kept
    return {
        "num_failed": len(runs) - len(good),
        "by_seed": {run["seed"]: run["accuracy"][-1] for run in good},
        "final": fmean(final),
        "final_interval": interval(final),
        "seeds_with_curve": [run["seed"] for run in whole],
        "area": fmean(fmean(run["accuracy"]) for run in whole) if whole else math.nan,
        "prompts": fmean(run["num_prompts"] for run in whole) if whole else math.nan,
    }


def summaries_of(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    names = [name for name in (*ALGORITHMS, *CONTROLS) if any(run["name"] == name for run in runs)]
    return {name: summary_of([run for run in runs if run["name"] == name]) for name in names}


def table(summaries: dict[str, dict[str, Any]], steps: int) -> str:
    """Markdown, best first by the accuracy at the end, the controls last."""
    lines = [
        f"{steps} steps of 16 prompts x 8 responses; means over seeds with 95% intervals.",
        "",
        "| algorithm | accuracy at the end | by seed | mean over the run | prompts sampled |",
        "|---|---|---|---|---|",
    ]
    done = {name: row for name, row in summaries.items() if "final" in row}
    for name in sorted(done, key=lambda one: (one in CONTROLS, -done[one]["final"])):
        row = done[name]
        shown = f"control: {name}"
        if name not in CONTROLS:
            shown = f"[{ALGORITHMS[name].title}]({ALGORITHMS[name].page or name}.md)"
        by_seed = ", ".join(f"{value:.2f}" for value in row["by_seed"].values())
        lines.append(
            f"| {shown} | {row['final']:.2f} ± {row['final_interval']:.2f} | {by_seed} "
            f"| {row['area']:.2f} | {row['prompts']:.0f} |"
        )
    for name, row in summaries.items():
        if row["num_failed"]:
            lines.append(f"\n{row['num_failed']} runs of {name} failed.")
    return "\n".join(lines) + "\n"


def draw(runs: Sequence[dict[str, Any]], folder: Path) -> None:
    """A picture per algorithm: its seeds, their mean, and the controls in grey."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = [run for run in runs if "steps" in run]
    controls = [run for run in good if run["name"] in CONTROLS]
    for name in dict.fromkeys(run["name"] for run in good if run["name"] not in CONTROLS):
        figure, axes = pyplot.subplots(figsize=(4.2, 2.6), dpi=90)
        for run in controls:
            axes.plot(run["steps"], run["accuracy"], color="0.8", linewidth=0.8)
        own = [run for run in good if run["name"] == name]
        for run in own:
            axes.plot(run["steps"], run["accuracy"], color="C0", alpha=0.35, linewidth=0.8)
        mean = [fmean(values) for values in zip(*(run["accuracy"] for run in own), strict=False)]
        axes.plot(own[0]["steps"][: len(mean)], mean, color="C0", linewidth=2)
        axes.set(xlabel="step", ylabel="accuracy", ylim=(0, 1.02), title=ALGORITHMS[name].title)
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png")
        pyplot.close(figure)


def report(results: dict[str, Any], folder: Path) -> None:
    """Table and curves from the numbers."""
    text = table(summaries_of(results["runs"]), results["steps"])
    (folder / "algorithms.md").write_text(text)
    print(text)
    try:
        draw(results["runs"], folder)
    except ModuleNotFoundError as error:
        print(f"no curves: {error}; --draw makes them from algorithms.json elsewhere")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/algorithms"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="+", choices=[*ALGORITHMS, *CONTROLS], metavar="NAME")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--one", choices=[*ALGORITHMS, *CONTROLS], help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(options.one, options.seed, options.steps)))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    numbers = options.out / "algorithms.json"
    if options.draw:
        report(json.loads(numbers.read_text()), options.out)
        return
    names = options.only or [*ALGORITHMS, *CONTROLS]
    tasks = [{"name": name, "seed": seed} for seed in options.seeds for name in names]
    runs = run_all(
        tasks,
        lambda task: [
            *("-m", "benchmarks.algorithms", "--steps", str(options.steps)),
            *("--one", task["name"], "--seed", str(task["seed"])),
        ],
        options.out / "runs.jsonl",
        jobs=options.jobs,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    results = {"steps": options.steps, "runs": runs}
    numbers.write_text(json.dumps(results, indent=1))
    report(results, options.out)
    sys.exit(any("error" in one for one in runs))


if __name__ == "__main__":
    main()
