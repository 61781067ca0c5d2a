"""Curves of PRIME and of reward-model training on the toy of the tests, several seeds each.

    OMP_NUM_THREADS=1 python -m benchmarks.reward_curves prime \
        --output benchmarks/results/prime.json --picture docs/algorithms/prime.png
    OMP_NUM_THREADS=1 python -m benchmarks.reward_curves pairs \
        --output benchmarks/results/reward_models.json --picture docs/images/reward_models.png

The task is to write as many sevens as possible (a model of 30,000 weights); accuracy is the share
of sevens among eight tokens. Preferences are planted in pairs: the chosen response has more sevens.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt

from tests.toy import ACTOR, ROLLOUT, make_toy, recipe_run
from tests.trainer.test_rm import IMPLICIT, planted_pairs, train

PROCESS_ALONE = "algorithm.reward_gt_coef=0"
PRIME: dict[str, list[str]] = {
    "outcome alone": ["algorithm.reward_dpo_coef=0"],
    "both": [],
    "both, prime_norm=none": ["reward_model.prime_norm=none"],
    "token rewards alone": [PROCESS_ALONE],
    "both, update=after": ["reward_model.model.update=after"],
    "token rewards alone, model not trained": [PROCESS_ALONE, "reward_model.model.update=none"],
}
PAIRS: dict[str, list[str]] = {
    "bradley_terry": [],
    "implicit": list(IMPLICIT),
    "bradley_terry, lr 0": ["optim.lr=0"],
}


def prime_curve(toy: Path, output: Path, changes: list[str], seed: int) -> list[float]:
    metrics, _ = recipe_run(
        toy,
        output,
        "prime",
        f"reward_model.model.path={toy / 'model'}",
        "reward_model.micro_batch_size_per_gpu=64",
        "reward_model.model.optim.lr=0.003",
        "reward_model.reward_manager=naive",
        "data.filter_accuracy=false",
        "data.filter_truncate=false",
        "data.val_files=[]",
        "data.train_batch_size=8",
        f"{ACTOR}.ppo_mini_batch_size=8",
        f"{ROLLOUT}.n=8",
        "trainer.total_training_steps=15",
        f"data.seed={seed}",
        *changes,
    )
    return [step["critic/score/mean"] for step in metrics]


def pairs_curve(toy: Path, output: Path, changes: list[str], seed: int) -> list[float]:
    output.mkdir()
    for name, count, offset in (("train", 256, 1), ("test", 128, 2)):
        rows = planted_pairs(count, seed=2 * seed + offset)
        (output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["trainer.total_training_steps=24", "trainer.test_freq=2", f"trainer.seed={seed}"]
    metrics, _ = train(toy, output, output, *settings, *changes)
    return [step["val/accuracy"] for step in metrics if "val/accuracy" in step]


def measure(kind: str, num_seeds: int) -> dict[str, Any]:
    curve, variants = (prime_curve, PRIME) if kind == "prime" else (pairs_curve, PAIRS)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        toy = make_toy(Path(folder))
        for number, (name, changes) in enumerate(variants.items()):
            start = time.perf_counter()
            curves = [
                curve(toy, Path(folder) / f"{number}-{seed}", changes, seed)
                for seed in range(1, num_seeds + 1)
            ]
            seconds = (time.perf_counter() - start) / num_seeds
            found[name] = {"curves": curves, "seconds_per_run": round(seconds, 1)}
            last = [values[-1] for values in curves]
            print(f"{name:42} {fmean(last):.3f}  {' '.join(f'{v:.3f}' for v in last)}")
    return found


def draw(found: dict[str, Any], picture: Path, kind: str) -> None:
    steps_apart = 1 if kind == "prime" else 2
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, entry in found.items():
        steps = [steps_apart * (n + 1) for n in range(len(entry["curves"][0]))]
        (line,) = axes.plot(
            steps, [fmean(values) for values in zip(*entry["curves"], strict=True)], label=name
        )
        for values in entry["curves"]:
            axes.plot(steps, values, color=line.get_color(), alpha=0.25, linewidth=0.8)
    axes.set_xlabel("step")
    axes.set_ylabel("share of sevens" if kind == "prime" else "accuracy on held-out pairs")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("prime", "pairs"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--picture", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    found = measure(options.kind, options.seeds)
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    draw(found, options.picture, options.kind)


if __name__ == "__main__":
    main()
