"""Writes docs/algorithms: a page per algorithm of the table, and the index.

    python -m benchmarks.algorithm_pages [--results FOLDER]

`--results` is a folder that `benchmarks.algorithms` has filled: its numbers become
`benchmarks/results/algorithms.json`, its curves `docs/algorithms/curves`. A page that begins
without the note below was written by hand and is left alone.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.algorithm_table import ALGORITHMS, Algorithm
from benchmarks.algorithms import draw, table

DOCS = Path("docs/algorithms")
CURVES = DOCS / "curves"
NUMBERS = Path("benchmarks/results/algorithms.json")
NOTE = "<!-- made by `python -m benchmarks.algorithm_pages` from benchmarks/algorithm_table.py -->"
COMPARISON = """\
The task is a sum of two digits, the model has 30,000 weights and begins at about 10%; each line is
a number of runs on one CPU core each. All have the same batch, learning rate and number of steps,
which suits some better than others: the table says that each learns where the controls do not, and
roughly how fast, not which is best on your task. `python -m benchmarks.algorithms --jobs 16` makes
it again.
"""


def page(name: str, algorithm: Algorithm, summary: dict[str, Any] | None) -> str:
    """One algorithm: formula, command, metrics, curve, paper."""
    settings = " \\\n    ".join(algorithm.settings)
    parts = [
        f"# {algorithm.title}",
        NOTE,
        algorithm.what,
        f"```\n{algorithm.formula}\n```",
        f"[arXiv:{algorithm.paper}](https://arxiv.org/abs/{algorithm.paper}). Notation: r reward, "
        "A advantage, rho = pi / pi_old per token, g the responses to one prompt; "
        "[estimators](advantages.md), [losses](policy_losses.md).",
        f"## Run it\n\n```bash\npython -m verl.trainer.main_ppo \\\n    {settings}\n```",
    ]
    if algorithm.folder is not None:
        parts.append(
            f"`python -m {algorithm.command}` has the paper's values as defaults "
            f"([recipe](../../{algorithm.folder}/README.md))."
        )
    watched = "\n".join(f"- `{metric}`" for metric in algorithm.watch)
    parts.append(f"## Watch\n\n{watched}\n\n[metrics.md](../metrics.md) says what they mean.")
    if summary is not None and "final" in summary:
        parts.append(
            f"## Measured\n\n![accuracy over the steps](curves/{name}.png)\n\n"
            f"Accuracy at the end {summary['final']:.2f} ± {summary['final_interval']:.2f}, mean "
            f"over the run {summary['area']:.2f} ± {summary['area_interval']:.2f} (95% intervals); "
            "grey: controls. [What was run](README.md)."
        )
    return "\n\n".join(parts) + "\n"


def index(results: dict[str, Any] | None) -> str:
    rows = [
        f"| [{algorithm.title}]({algorithm.page or name}.md) | {algorithm.what} "
        f"| [{algorithm.paper}](https://arxiv.org/abs/{algorithm.paper}) |"
        for name, algorithm in ALGORITHMS.items()
    ]
    listed = [algorithm.page for algorithm in ALGORITHMS.values()]
    others = [
        path
        for path in sorted(DOCS.glob("*.md"))
        if path.stem not in (*ALGORITHMS, *listed, "README") and NOTE not in path.read_text()
    ]
    links = [f"- [{heading(path)}]({path.name})" for path in others]
    parts = [
        "# Algorithms",
        NOTE,
        "| algorithm | what it does | paper |\n|---|---|---|\n" + "\n".join(rows),
        "Further pages:\n\n" + "\n".join(links),
    ]
    if results is not None:
        shown = table(results["summaries"], results["num_seeds"], results["steps"])
        parts += ["## Compared", COMPARISON.strip(), shown.strip()]
    return "\n\n".join(parts) + "\n"


def heading(path: Path) -> str:
    return path.read_text().splitlines()[0].removeprefix("# ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    if options.results is not None:
        NUMBERS.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(options.results / "algorithms.json", NUMBERS)
        CURVES.mkdir(exist_ok=True)
        draw(json.loads(NUMBERS.read_text())["runs"], CURVES)
    results = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else None
    for name, algorithm in ALGORITHMS.items():
        path = DOCS / f"{algorithm.page or name}.md"
        if path.exists() and NOTE not in path.read_text():
            continue
        summary = None if results is None else results["summaries"].get(name)
        path.write_text(page(name, algorithm, summary))
    (DOCS / "README.md").write_text(index(results))


if __name__ == "__main__":
    main()
