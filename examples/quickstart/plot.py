"""The curve of a run: out of its metrics, as text and as a picture.

    python examples/quickstart/plot.py examples/quickstart/results/*.json --out curve.png

The picture needs matplotlib (`pip install matplotlib`); the text needs nothing.
"""

import argparse
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EIGHTHS = " ▏▎▍▌▋▊▉"


def read_metrics(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Step and values of every complete line that `trainer.logger=[file]` has written."""
    text = path.read_text() if path.exists() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():
        entry = json.loads(line)
        yield entry["step"], entry["data"]


def curves(metrics: Path, accuracy: str, **others: str) -> dict[str, list[dict[str, float]]]:
    """What is published of a run; `accuracy` and `others` name validation metrics."""
    names = {"accuracy": accuracy, **others}
    measured = {
        "reward": "critic/score/mean",
        "response_length": "response_length/mean",
        "seconds": "timing_s/step",
    }
    parts: dict[str, list[dict[str, float]]] = {"validation": [], "training": []}
    for step, data in read_metrics(metrics):
        for kind, wanted in ("validation", names), ("training", measured):
            if next(iter(wanted.values())) in data:
                values = {key: round(data[name], 4) for key, name in wanted.items()}
                parts[kind].append({"step": step, **values})
    return parts


def text_chart(results: dict[str, Any], width: int = 40) -> str:
    """A bar per validation: how many held-out problems are solved."""
    lengths = {entry["step"]: entry["response_length"] for entry in results["training"]}
    lines = [f"step  {'held-out accuracy':{width + 6}}  worked out  response tokens"]
    for entry in results["validation"]:
        length = lengths.get(entry["step"], lengths.get(entry["step"] + 1))
        lines.append(
            f"{entry['step']:4}  {bar(entry['accuracy'], width)} {entry['accuracy']:4.0%}"
            f"  {entry['worked_out']:10.0%}  {'' if length is None else round(length):>15}"
        )
    return "\n".join(lines)


def bar(share: float, width: int) -> str:
    full, part = divmod(round(share * width * 8), 8)
    return ("█" * full + EIGHTHS[part] * (part > 0)).ljust(width, "·")


def draw(
    runs: list[dict[str, Any]], path: Path, accuracy: str = "held-out accuracy, greedy"
) -> str:
    """Write the picture of one or several runs; gives its path, or how to get one."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no picture: pip install matplotlib"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    panels = (
        (accuracy, "validation", "accuracy"),
        ("reward of the samples, temperature 1", "training", "reward"),
        ("tokens per response", "training", "response_length"),
    )
    for axis, (title, kind, name) in zip(axes, panels, strict=True):
        for run in runs:
            steps = [entry["step"] for entry in run[kind]]
            values = [entry[name] for entry in run[kind]]
            axis.plot(steps, values, label=f"seed {run['recipe']['seed']}", marker=".")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("GRPO step")
        lowest = min(entry[name] for run in runs for entry in run[kind])
        axis.set_ylim(min(0, lowest), 1.02 if name != "response_length" else None)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return str(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the curves of one or several runs.")
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("curve.png"))
    arguments = parser.parse_args()
    loaded = [json.loads(file.read_text()) for file in arguments.results]
    for run in loaded:
        print(f"seed {run['recipe']['seed']}\n{text_chart(run)}\n")
    print(draw(loaded, arguments.out))
