"""Curves of the recipes on toys, with controls: several seeds, numbers and pictures.

    python -m benchmarks.recipe_curves --out results [--jobs 16] [--seeds 3] [--only prime ...]
    python -m benchmarks.recipe_curves --out results --draw    (pictures, into the pages' folders)

Most learn to write sevens: a model of 30,000 random weights, eight prompts with eight responses a
step. Reward models learn which of two texts has more sevens, and are measured on other pairs.
CollabLLM counts sevens in conversations with a simulated user. ReTool and Search-R1 fine-tune a
small model and reinforce it with the code interpreter and the search server of `examples`; accuracy
is that of held-out questions. Each run is a process with one thread.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.apart import run_all

TIMEOUT_SECONDS = 570
LR_0 = "actor_rollout_ref.actor.optim.lr=0.0"
PROCESS_ALONE = "algorithm.reward_gt_coef=0"
COLORS = ("tab:blue", "tab:gray", "tab:orange", "tab:green", "tab:red", "tab:purple")
Points = list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is drawn into one picture: a line for each variant, thin ones for its seeds."""

    run: "Callable[[Path, int, int | None, str, Sequence[str]], Points]"
    variants: dict[str, tuple[str, ...]]
    picture: str
    ylabel: str
    xlabel: str = "step"


# ---- runs: (folder, seed, steps or None, recipe, settings) -> points -----------------------------


def pairs(folder: Path, seed: int, steps: int | None, name: str, changes: Sequence[str]) -> Points:
    """The recipes that compare responses, and the newer losses."""
    from tests.toy import make_toy
    from tests.trainer.recipes.pair_cases import learn

    scores = learn(
        make_toy(folder), folder / "run", name, f"data.seed={seed}", *shorter(steps), *changes
    )
    return list(enumerate(scores, 1))


def prime(folder: Path, seed: int, steps: int | None, name: str, changes: Sequence[str]) -> Points:
    from tests.toy import ACTOR, ROLLOUT, make_toy, recipe_run

    toy = make_toy(folder)
    metrics, _ = recipe_run(
        toy,
        folder / "run",
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
        f"data.seed={seed}",
        *(shorter(steps) or ["trainer.total_training_steps=15"]),
        *changes,
    )
    return [(step["step"], step["critic/score/mean"]) for step in metrics]


def reward_model(
    folder: Path, seed: int, steps: int | None, name: str, changes: Sequence[str]
) -> Points:
    from tests.toy import make_toy
    from tests.trainer.test_rm import planted_pairs, train

    toy = make_toy(folder)
    for split, count, offset in (("train", 256, 1), ("test", 128, 2)):
        rows = planted_pairs(count, seed=2 * seed + offset)
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["trainer.total_training_steps=24", "trainer.test_freq=2", f"trainer.seed={seed}"]
    metrics, _ = train(toy, folder, folder / "run", *settings, *shorter(steps), *changes)
    measured = [step["val/accuracy"] for step in metrics if "val/accuracy" in step]
    return [(2 * number, accuracy) for number, accuracy in enumerate(measured, 1)]


def collabllm(
    folder: Path, seed: int, steps: int | None, name: str, changes: Sequence[str]
) -> Points:
    from tests.toy import make_toy
    from tests.trainer.recipes.collab_case import learn_collab

    graded_by, *settings = changes
    scores = learn_collab(
        make_toy(folder),
        folder / "run",
        f"data.seed={seed}",
        *shorter(steps),
        *settings,
        graded_by=graded_by,
    )
    return list(enumerate(scores, 1))


def with_tools(
    folder: Path, seed: int, steps: int | None, name: str, changes: Sequence[str]
) -> Points:
    """An example that fine-tunes and reinforces, by its own command."""
    example = {"retool": "code_interpreter", "search_r1": "search"}[name]
    short = [] if steps is None else ["--sft-steps", str(steps), "--grpo-steps", str(steps)]
    command = [f"examples/{example}/run.py", "--seed", str(seed), "--out", str(folder / "run")]
    subprocess.run(
        [sys.executable, *command, *short, *changes],
        check=True,
        stdout=sys.stderr,
        timeout=TIMEOUT_SECONDS,
    )
    results = json.loads((folder / "run" / "results.json").read_text())
    return [(entry["step"], entry["accuracy"]) for entry in results["validation"]]


def evaluation(
    folder: Path, seed: int, steps: int | None, name: str, changes: Sequence[str]
) -> Points:
    """pass@k of the model of `benchmarks.algorithms`, whose training has not begun."""
    from benchmarks.algorithms import make_task

    make_task(folder, seed)
    answers, result = folder / "answers.parquet", folder / "result.json"
    for module, words in {
        "verl.trainer.main_generation": [
            f"model.path={folder / 'model'}",
            f"data.path={folder / 'val.jsonl'}",
            f"data.output_path={answers}",
            f"data.n_samples={steps or 64}",
            "rollout.prompt_length=4",
            "rollout.response_length=2",
            "rollout.temperature=1.0",
        ],
        "recipe.r1.main_eval": [
            f"data.path={answers}",
            f"data.output_path={result}",
            f"custom_reward_function.path={folder / 'reward.py'}",
            "grading.num_workers=1",
        ],
    }.items():
        command = [sys.executable, "-m", module, *words, f"hydra.run.dir={folder / 'hydra'}"]
        subprocess.run(command, check=True, stdout=sys.stderr, timeout=TIMEOUT_SECONDS)
    found = json.loads(result.read_text())["sources"]["sums"]["pass_at"]
    return [(int(k), entry["value"]) for k, entry in found.items()]


def shorter(steps: int | None) -> list[str]:
    return [] if steps is None else [f"trainer.total_training_steps={steps}"]


# ---- recipes -------------------------------------------------------------------------------------

TRAINED = {"trained": (), "learning rate 0": (LR_0,)}
RECIPES: dict[str, Recipe] = {
    name: Recipe(run=pairs, variants=TRAINED, picture=picture, ylabel="score")
    for name, picture in {
        "online_dpo": "recipe/online_dpo/curve.png",
        "spin": "recipe/spin/curve.png",
        "sppo": "recipe/sppo/curve.png",
        "gvpo": "docs/algorithms/gvpo.png",
        "dppo_tv": "docs/algorithms/dppo_tv.png",
        "dppo_kl": "docs/algorithms/dppo_kl.png",
    }.items()
} | {
    "prime": Recipe(
        run=prime,
        variants={
            "outcome alone": ("algorithm.reward_dpo_coef=0",),
            "both": (),
            "both, prime_norm=none": ("reward_model.prime_norm=none",),
            "token rewards alone": (PROCESS_ALONE,),
            "both, update=after": ("reward_model.model.update=after",),
            "token rewards alone, model not trained": (
                PROCESS_ALONE,
                "reward_model.model.update=none",
            ),
        },
        picture="docs/algorithms/prime.png",
        ylabel="share of sevens",
    ),
    "reward_models": Recipe(
        run=reward_model,
        variants={
            "bradley_terry": (),
            "learning rate 0": ("optim.lr=0",),
            "implicit": (
                "objective.name=implicit",
                "objective.beta_train=0.5",
                "optim.lr=0.003",
            ),
        },
        picture="docs/images/reward_models.png",
        ylabel="accuracy on held-out pairs",
    ),
    "collabllm": Recipe(
        run=collabllm,
        variants={
            "trained": ("sevens",),
            "learning rate 0": ("sevens", LR_0),
            "graded by something else": ("noise",),
        },
        picture="recipe/collabllm/curve.png",
        ylabel="sevens in the conversations",
    ),
    "retool": Recipe(
        run=with_tools,
        variants=TRAINED,
        picture="recipe/retool/curve.png",
        ylabel="held-out accuracy",
    ),
    "r1": Recipe(
        run=evaluation,
        variants={"10% right": ()},
        picture="recipe/r1/curve.png",
        ylabel="pass@k",
        xlabel="k",
    ),
    "search_r1": Recipe(
        run=with_tools,
        variants=TRAINED,
        picture="recipe/search_r1/curve.png",
        ylabel="held-out accuracy",
    ),
}


def run_one(name: str, variant: str, seed: int, steps: int | None) -> dict[str, Any]:
    """Train once, in this process."""
    recipe = RECIPES[name]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        points = recipe.run(Path(folder), seed, steps, name, recipe.variants[variant])
        seconds = time.perf_counter() - start
    return {"seconds": round(seconds, 1), "points": [(x, round(y, 4)) for x, y in points]}


# ---- pictures ------------------------------------------------------------------------------------


def draw(runs: Sequence[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name in dict.fromkeys(run["name"] for run in runs):
        recipe = RECIPES[name]
        figure, axes = pyplot.subplots(figsize=(5.5, 3.2), layout="constrained")
        for color, variant in zip(COLORS, recipe.variants, strict=False):
            curves = [r["points"] for r in runs if (r["name"], r["variant"]) == (name, variant)]
            for points in curves:
                axes.plot(*zip(*points, strict=True), color=color, alpha=0.3, linewidth=0.8)
            if curves:
                means = [fmean(y for _, y in at) for at in zip(*curves, strict=False)]
                steps = [x for x, _ in curves[0]][: len(means)]
                axes.plot(steps, means, color=color, label=variant)
        axes.set(title=name, xlabel=recipe.xlabel, ylabel=recipe.ylabel, ylim=(0, 1.02))
        axes.legend(fontsize=7)
        Path(recipe.picture).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(recipe.picture, dpi=90)
        pyplot.close(figure)
        print(recipe.picture)


def summary(runs: Sequence[dict[str, Any]]) -> str:
    """The first and the last value of each seed."""
    lines = []
    for name, variant in dict.fromkeys((run["name"], run["variant"]) for run in runs):
        own = [r for r in runs if (r["name"], r["variant"]) == (name, variant) and "points" in r]
        starts, ends = ([r["points"][place][1] for r in own] for place in (0, -1))
        shown = f"{[round(v, 2) for v in starts]} -> {[round(v, 2) for v in ends]}"
        seconds = fmean(r["seconds"] for r in own) if own else 0.0
        lines.append(f"{name:14} {variant:40} {shown}  {seconds:.0f} s a run")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/recipe_curves"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of each recipe's own number")
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "VARIANT"), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(*options.one, options.seed, options.steps)))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    numbers = options.out / "recipe_curves.json"
    if options.draw:
        draw([run for run in json.loads(numbers.read_text()) if "points" in run])
        return
    tasks = [  # the long ones first
        {"name": name, "variant": variant, "seed": seed}
        for name in reversed(options.only)
        for seed in range(options.seeds)
        for variant in RECIPES[name].variants
    ]
    short = [] if options.steps is None else ["--steps", str(options.steps)]
    runs = run_all(
        tasks,
        lambda task: [
            *("-m", "benchmarks.recipe_curves", "--seed", str(task["seed"])),
            *("--one", task["name"], task["variant"], *short),
        ],
        options.out / "runs.jsonl",
        jobs=options.jobs,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    numbers.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")  # a run per line
    print(summary(runs))
    sys.exit(any("error" in run for run in runs))


if __name__ == "__main__":
    main()
