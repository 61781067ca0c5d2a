"""Writes docs/algorithms: a page per algorithm of the table, and the index.

    python -m benchmarks.algorithm_pages [--results FOLDER]

`--results` is a folder that `benchmarks.algorithms` has filled: its runs go into
`benchmarks/results/algorithms.json`, in place of those of the same algorithm and seed, and curves
into `docs/algorithms/curves`. A page without the note below was written by hand and is left alone.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.algorithm_table import ALGORITHMS, ESTIMATOR, ROLLOUT, Algorithm
from benchmarks.algorithms import draw, summaries_of, table

DOCS = Path("docs/algorithms")
CURVES = DOCS / "curves"
NUMBERS = Path("benchmarks/results/algorithms.json")
NOTE = "<!-- made by `python -m benchmarks.algorithm_pages` from benchmarks/algorithm_table.py -->"
COMPARISON = """\
The task is a sum of two digits, the model has 30,000 weights and begins at about 10%; each run has
one thread. All have the same batch, learning rate and number of steps, which suits some better than
others: two epochs of two mini-batches, so that losses that differ away from the sampling policy do
differ. `python -m benchmarks.algorithms --out FOLDER` and then
`python -m benchmarks.algorithm_pages --results FOLDER` make it again
([numbers](../../benchmarks/results/algorithms.json)). The mean over the run and the prompts are of
the seeds whose whole curve was kept.
"""
READING = """\
A seed is also a model: that of seed 4 is hard for all, so read `by seed` as pairs. The intervals of
most overlap: five seeds of a toy rank nothing. They show that each learns, on
average, where a control (learning rate 0, rewards of other prompts) does not, and roughly how fast.
Nothing was tuned: one learning rate favours losses that move as far as PPO's. PRIME's token rewards
and Pass@k are slow here; PRIME learns with some seeds and not with others. DAPO samples several
times as many prompts, because it goes on until groups differ.
"""


SHOWN = """\
| what | test or command |
|---|---|
| formulas against numbers worked by hand, fp64 | `tests/algos` |
| policy gradient, cross-entropy and KL, each divided by its own global count: one gradient however the batch is cut | `tests/parity/test_loss_invariance.py`, `make test-invariance` |
| each algorithm learns where a learning rate of 0 and rewards of other prompts do not | [one task](comparison.md); `python -m benchmarks.algorithms` |
| recipes learn on toys of their own, controls do not | `python -m benchmarks.recipe_curves`; `tests/trainer/recipes -m 'slow or not slow'` |
| every `recipe.<name>.main_<name>` starts with its defaults | `tests/trainer/recipes/test_commands.py`, `tests/trainer/recipes/test_pair_commands.py` |
| a recipe with a `fit` and workers of its own, over `RayPPOTrainer` | `tests/trainer/recipes/test_own_loop.py` |
| kill -9 and resume, bit for bit: SPIN, PRIME; PF-PPO's buffer; distillation with demonstrations | `tests/e2e/test_resume.py`, `tests/trainer/recipes/test_pf_ppo.py`, `tests/trainer/test_distillation.py`, all `-m 'slow or not slow'` |
| teachers in process, as engines and as endpoints say the same; several by key; the policy as its own | `tests/trainer/test_distillation.py`, [distillation.md](../distillation.md) |
| reward models from preferences, both objectives | `tests/trainer/test_rm.py`, [reward_models.md](../reward_models.md) |
| a teacher with another tokenizer, pairs with equal rewards, a missing reference are named | `tests/trainer/test_distillation.py`, `tests/trainer/recipes/test_pair_runs.py`, `tests/algos/test_policy_losses_sequences.py` |
| DAPO, PRIME and distillation on SmolLM2-135M, one seed on an H200: 9% of held-out sums before, 88% and 88% after 40 steps, 83% after 20 | `python -m benchmarks.gpu.recipes_smollm2 --model FOLDER --out FOLDER` ([curves](../images/recipes_smollm2.png)) |
"""  # noqa: E501


def settings_on_page(algorithm: Algorithm) -> list[str]:
    """A whole run: the algorithm on GSM8K, on one GPU."""
    data, model = "$HOME/data/gsm8k", "Qwen/Qwen2.5-0.5B-Instruct"
    pairs = dict(setting.split("=", 1) for setting in algorithm.settings) | algorithm.advised
    own = [f"{key}={value}" for key, value in pairs.items() if value is not None]
    settings = [
        f"data.train_files={data}/train.parquet data.val_files={data}/test.parquet",
        f"actor_rollout_ref.model.path={model} trainer.n_gpus_per_node=1",
    ]
    if f"{ESTIMATOR}=gae" in own:
        settings.append(f"critic.model.path={model}")
    if algorithm.samples > 1:
        settings.append(f"{ROLLOUT}.n={algorithm.samples}")
    return [*settings, *own]


def page(name: str, algorithm: Algorithm, summary: dict[str, Any] | None) -> str:
    """One algorithm: formula, command, metrics, curve, paper."""
    settings = " \\\n    ".join(settings_on_page(algorithm))
    parts = [
        f"# {algorithm.title}",
        NOTE,
        algorithm.what,
        f"```\n{algorithm.formula}\n```",
        f"[arXiv:{algorithm.paper}](https://arxiv.org/abs/{algorithm.paper}). Notation: r reward, "
        "A advantage, rho = pi / pi_old per token, g the responses to one prompt; "
        "[estimators](advantages.md), [losses](policy_losses.md).",
        f"## Run it\n\n```bash\npython -m verl.trainer.main_ppo \\\n    {settings}\n```",
        "The data are those of [GSM8K, step by step](../gsm8k.md); options that are not named keep "
        "their [defaults](../config.md).",
    ]
    if algorithm.folder is not None:
        parts.append(
            f"`python -m {algorithm.command}` has the paper's values as defaults "
            f"([recipe](../../{algorithm.folder}/README.md))."
        )
    watched = "\n".join(f"- `{metric}`" for metric in algorithm.watch)
    parts.append(f"## Watch\n\n{watched}\n\n[metrics.md](../metrics.md) says what they mean.")
    if summary is not None and summary.get("seeds_with_curve"):
        drawn = "seed " + ", ".join(map(str, summary["seeds_with_curve"]))
        parts.append(
            f"## Measured\n\n![accuracy over the steps](curves/{name}.png)\n\n"
            f"Accuracy at the end {summary['final']:.2f} ± {summary['final_interval']:.2f} "
            f"({len(summary['by_seed'])} seeds, 95% interval); the curve: {drawn}, grey: controls. "
            "[What was run](comparison.md)."
        )
        if toys := sorted({*algorithm.settings} - {*settings_on_page(algorithm)}):
            parts.append(
                "Other than above, that toy has " + ", ".join(f"`{t}`" for t in toys) + "."
            )
    return "\n\n".join(parts) + "\n"


def index() -> str:
    rows = [
        f"| [{algorithm.title}]({algorithm.page or name}.md) | {algorithm.what} "
        f"| [{algorithm.paper}](https://arxiv.org/abs/{algorithm.paper}) |"
        for name, algorithm in ALGORITHMS.items()
    ]
    listed = [algorithm.page for algorithm in ALGORITHMS.values()]
    others = [
        path
        for path in sorted(DOCS.glob("*.md"))
        if path.stem not in (*ALGORITHMS, *listed, "README")
    ]
    links = [f"- [{heading(path)}]({path.name})" for path in others]
    parts = [
        "# Algorithms",
        NOTE,
        "| algorithm | what it does | paper |\n|---|---|---|\n" + "\n".join(rows),
        "Further pages:\n\n" + "\n".join(links),
        "## What is shown, and by what",
        SHOWN.strip(),
    ]
    return "\n\n".join(parts) + "\n"


def comparison(results: dict[str, Any]) -> str:
    """All of them in one table, and where they ran."""
    machines: dict[str, set[int]] = {}
    for run in results["runs"]:
        machines.setdefault(run["machine"], set()).add(run["seed"])
    where = [
        f"- {machine}: seeds {', '.join(map(str, sorted(seeds)))}"
        for machine, seeds in machines.items()
    ]
    parts = ["# One task, one budget", NOTE, COMPARISON.strip()]
    parts += [table(summaries_of(results["runs"]), results["steps"]).strip(), READING.strip()]
    return "\n\n".join([*parts, "Where they ran:\n\n" + "\n".join(where)]) + "\n"


def add_runs(results: dict[str, Any], folder: Path) -> dict[str, Any]:
    """With the finished runs of a folder, in place of those of the same algorithm and seed."""
    known = {(run["name"], run["seed"]): run for run in results["runs"]}
    for line in (folder / "runs.jsonl").read_text().splitlines():
        run = json.loads(line)
        if "error" not in run:
            known[run["name"], run["seed"]] = run
    return {**results, "runs": [known[key] for key in sorted(known)]}


def heading(path: Path) -> str:
    return path.read_text().splitlines()[0].removeprefix("# ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    results = json.loads(NUMBERS.read_text())
    if options.results is not None:
        results = add_runs(results, options.results)
        NUMBERS.write_text(json.dumps(results) + "\n")
        CURVES.mkdir(exist_ok=True)
        draw(results["runs"], CURVES)
    summaries = summaries_of(results["runs"])
    for name, algorithm in ALGORITHMS.items():
        path = DOCS / f"{algorithm.page or name}.md"
        if not path.exists() or NOTE in path.read_text():
            path.write_text(page(name, algorithm, summaries.get(name)))
    (DOCS / "comparison.md").write_text(comparison(results))
    (DOCS / "README.md").write_text(index())


if __name__ == "__main__":
    main()
