"""Curves of the recipes that learn from pairs and of the newer losses, on the toy of sevens.

    python -m benchmarks.pair_curves --out build/pairs [--seeds 3] [--only spin ...]

The task: write as many sevens as you can in eight tokens, with a model of 30,000 random weights.
Twenty steps of eight prompts with eight responses each; the control has a learning rate of 0.
Writes `pairs.json` and, where matplotlib is installed, `<name>.png`. Minutes on one core.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import fmean

from tests.toy import ACTOR, make_toy
from tests.trainer.recipes.pair_cases import RUNS, learn

Curves = dict[str, list[list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(RUNS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        toy = make_toy(Path(folder))
        for name in options.only:
            start = time.perf_counter()
            curves = measure(toy, Path(folder) / name, name, options.seeds)
            seconds = time.perf_counter() - start
            found[name] = {**curves, "seconds": round(seconds, 1)}
            ends = {kind: fmean(scores[-1] for scores in curves[kind]) for kind in curves}
            print(name, {kind: round(end, 3) for kind, end in ends.items()}, f"{seconds:.0f} s")
            draw(options.out / f"{name}.png", name, curves)
            (options.out / "pairs.json").write_text(json.dumps(found))


def measure(toy: Path, output: Path, name: str, seeds: int) -> Curves:
    """Scores of every step, for each seed, and those of the control."""
    output.mkdir()
    curves: Curves = {"trained": [], "learning rate 0": []}
    for seed in range(seeds):
        for kind, changes in (("trained", ()), ("learning rate 0", (f"{ACTOR}.optim.lr=0.0",))):
            place = output / f"{seed} {kind}".replace(" ", "_")
            scores = learn(toy, place, name, f"data.seed={seed}", *changes)
            curves[kind].append([round(score, 4) for score in scores])
    return curves


def draw(path: Path, name: str, curves: Curves) -> None:
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot as plt
    except ImportError:
        print(f"matplotlib is not installed: no {path.name}")
        return
    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    for (kind, runs), color in zip(curves.items(), ("tab:blue", "tab:gray"), strict=True):
        for scores in runs:
            label = kind if scores is runs[0] else None
            axes.plot(range(1, len(scores) + 1), scores, color=color, label=label)
    axes.set(title=name, xlabel="step", ylabel="score", ylim=(0, 1))
    axes.legend(loc="center right")
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
