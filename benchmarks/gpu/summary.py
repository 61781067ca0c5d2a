"""From the JSON files of `all.py` to tables. Every number comes from a file.

python -m benchmarks.gpu.summary DIR                         # print the tables
python -m benchmarks.gpu.summary DIR docs/performance.md     # put them between the marks for DIR
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

CLAIMS = ("decode", "train", "kernels", "grpo_step", "trl_step", "exact", "filtered")

WORK = "prompts x samples x tokens, prompt tokens"

Run = dict[str, Any]


def summarise(folder: Path) -> str:
    """All tables, in Markdown."""
    runs = {claim: list(read(folder, claim)) for claim in CLAIMS}
    done = {claim: [r for r in found if r["status"] == "done"] for claim, found in runs.items()}
    begun = [run for run in runs["grpo_step"] if run["status"] == "done" or run.get("variants")]
    blocks = [
        machine([run for found in done.values() for run in found]),
        generation(done["decode"]),
        training(done["train"]),
        kernels(done["kernels"]),
        steps(begun, done["trl_step"]),
        exactness(done["exact"]),
        filtering(done["filtered"]),
        missing(runs),
    ]
    return "\n".join(block for block in blocks if block)


def read(folder: Path, claim: str) -> Iterator[Run]:
    path = folder / f"{claim}.json"
    if path.exists():
        yield from json.loads(path.read_text())["runs"]


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(row) for row in (head, ["---"] * len(head), *rows)]
    if len(lines) == 2:
        return ""
    return "\n".join([f"**{title}**", "", *(f"| {line} |" for line in lines), ""])


def machine(runs: list[Run]) -> str:
    if not runs:
        return "Nothing was measured.\n"
    where = runs[0]["environment"]
    versions = {k: v for run in runs for k, v in run["environment"]["versions"].items()}
    found = [run["ceilings"] for run in runs if "ceilings" in run]
    products, copies = ([c[name] for c in found] for name in ("matmul_tflops", "copy_tb_per_s"))
    text = f"{where['device']}, {where['date'][:10]}, "
    text += ", ".join(f"{name} {version}" for name, version in versions.items())
    if found:
        text += f"; ceilings measured in the same runs: {spread(products, 0)} TFLOP/s, "
        text += f"{spread(copies, 2)} TB/s"
    return text + ".\n"


def spread(values: Sequence[float], digits: int) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def size(run: Run) -> str:
    work = run["workload"]
    return f"{work['prompts']} x {work['samples']} x {work['new_tokens']}, {work['prompt_tokens']}"


def count(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.0f}"


def percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def generation(runs: list[Run]) -> str:
    whole = table(
        "Generation: log-probs returned, prefill included",
        ["shape", WORK, "tokens/s", "seconds", "prefill", "floor",
         "of the floor", "GiB (of it cache)"],
        [
            [
                run["shape"],
                size(run),
                count(run["tokens_per_second"]),
                spread(run["seconds"], 2),
                f"{median(run['prefill_seconds']):.2f}",
                f"{run['floor_seconds']['total']:.2f}",
                percent(run["share_of_floor"]),
                f"{run['peak_gib'] + run['cache_gib']:.0f} ({run['cache_gib']:.0f})",
            ]
            for run in runs
        ],
    )  # fmt: skip
    pairs = [(run["shape"], run["beside_generate"]) for run in runs if "beside_generate" in run]
    beside = table(
        "Beside transformers' `generate` in the same process, taking turns",
        ["shape", WORK, "tokens/s", "`generate`", "times as fast", "pairs"],
        [
            [
                shape,
                size(pair),
                count(pair["tokens_per_second"]["verl"]),
                count(pair["tokens_per_second"]["generate"]),
                f"{pair['times_as_fast']:.1f}",
                str(len(pair["seconds"]["verl"])),
            ]
            for shape, pair in pairs
        ],
    )
    return "\n".join(part for part in (whole, beside) if part)


def training(runs: list[Run]) -> str:
    return table(
        "Training: the samples of a prompt are rows of a group",
        ["shape", WORK, "prompt computed", "tokens/s forward and backward", "of the promised peak",
         "with optimizer", "log-probs tokens/s", "of the peak", "GiB"],
        [
            [
                run["shape"],
                size(run),
                {"shared": "once per group", "whole": "once per row"}[name],
                count(found["tokens_per_second"]),
                percent(found["utilisation"]),
                percent(found["utilisation_with_optimizer"]),
                count(found["log_probs_tokens_per_second"]),
                percent(found["log_probs_utilisation"]),
                f"{max(found['peak_gib'].values()):.0f}",
            ]
            for run in runs
            for name, found in run["variants"].items()
        ],
    )  # fmt: skip


def kernels(runs: list[Run]) -> str:
    if not runs:
        return ""
    return table(
        "Where a training step's time goes: seconds of kernels, prompts once per group",
        ["shape", WORK, *runs[0]["seconds"], "TFLOP/s of the products", "ceiling"],
        [
            [
                run["shape"],
                size(run),
                *(
                    f"{seconds:.3f} ({percent(seconds / sum(run['seconds'].values()))})"
                    for seconds in run["seconds"].values()
                ),
                f"{run['product_tflops']:.0f}",
                f"{run['ceilings']['matmul_tflops']:.0f}",
            ]
            for run in runs
        ],
    )


PHASES = ("step", "generate", "prefill", "reward", "old_log_probs", "forward_backward", "optimizer")


COMPARED = {"base": "", "main_ppo": " of `main_ppo`"}
"""Variants that are set beside TRL, and what to call them."""


def steps(runs: list[Run], trl_runs: list[Run]) -> str:
    """Of runs that were cut short, what they had measured by then."""
    rows = []
    for run in runs:
        for name, found in run["variants"].items():
            seconds = phase_seconds(found["median_seconds"])
            samples = len(run["samples"][name])
            extent = [f"{found['peak_gib']:.0f}", percent(found["utilisation"]), str(samples)]
            title = "`main_ppo`" if name == "main_ppo" else name.replace("_", " ")
            title += "" if run["status"] == "done" else " (cut short)"
            rows.append([run["shape"], size(run), title, *seconds, *extent])
    for run in trl_runs:
        extent = [f"{run['peak_gib']:.0f}", "", str(len(run["samples"]))]
        seconds = phase_seconds(run["median_seconds"])
        rows.append([run["shape"], size(run), trl(run), *seconds, *extent])
    names = ["forward and backward" if name == "forward_backward" else name for name in PHASES]
    head = ["shape", WORK, "variant", *(name.replace("_", " ") for name in names)]
    head += ["GiB", "of the peak", "samples"]
    title = "GRPO step: medians of seconds"
    return table(title, head, rows) + beside_trl(runs, trl_runs)


def phase_seconds(seconds: dict[str, float]) -> list[str]:
    """A cell for each phase; some runs know the whole update only."""
    cells = {phase: f"{value:.2f}" for phase, value in seconds.items()}
    if "forward_backward" not in cells:
        cells["forward_backward"] = f"{cells['update']} with optimizer"
    return [cells.get(phase, "") for phase in PHASES]


def beside_trl(runs: list[Run], trl_runs: list[Run]) -> str:
    """How many times as fast the step is, where both did the same work."""
    lines = []
    for other in trl_runs:
        for run in runs:
            same = (run["shape"], run["workload"]) == (other["shape"], other["workload"])
            for name in (name for name in COMPARED if same and name in run["variants"]):
                ours = run["variants"][name]["median_seconds"]["step"]
                ratio = other["median_seconds"]["step"] / ours
                whose = f"{run['shape']} step{COMPARED[name]}"
                lines.append(f"\nThe {whose} is {ratio:.1f} times as fast as {trl(other)}.\n")
    return "".join(lines)


def trl(run: Run) -> str:
    """What ran: its version, and the allocator's options if there were any."""
    found = run["environment"]
    options = f" with `{found['allocator']}`" if found["allocator"] else " as it comes"
    return f"TRL {found['versions']['trl']}{options}"


def exactness(runs: list[Run]) -> str:
    return table(
        "Equal bits in rollout and training",
        ["shape", WORK, "variant", "step seconds", "generate",
         "old log-probs", "update", "largest difference of log-probs"],
        [
            [
                run["shape"],
                size(run),
                name,
                *(
                    f"{found['median_seconds'][phase]:.2f}"
                    for phase in ("step", "generate", "old_log_probs", "update")
                ),
                f"{largest_difference(run['samples'][name]):.2g}",
            ]
            for run in runs
            for name, found in run["variants"].items()
        ],
    )  # fmt: skip


def largest_difference(samples: list[Run]) -> float:
    return max(sample["difference_from_rollout"]["max"] for sample in samples)


def filtering(runs: list[Run]) -> str:
    return table(
        "Generation with filters: log-probs returned, prefill included",
        ["shape", WORK, "filters", "tokens/s", "of that without", "runs"],
        [
            [
                run["shape"],
                size(run),
                name,
                count(found["tokens_per_second"]),
                percent(found["share_of_none"]),
                str(len(run["seconds"][name])),
            ]
            for run in runs
            for name, found in run["variants"].items()
        ],
    )


def missing(runs: dict[str, list[Run]]) -> str:
    lines = [
        f"- {claim} `{run['arguments']}`: {run['status']}, {run['reason'].strip().splitlines()[-1]}"
        for claim, found in runs.items()
        for run in found
        if run["status"] != "done"
    ]
    return "\n".join(["Cut short or not measured:", "", *lines, ""]) if lines else ""


def put_between_marks(page: str, name: str, text: str) -> str:
    """`name` is that of the folder with the results; a page may show several."""
    begin, end = (f"<!-- {name}: {place} -->" for place in ("begin", "end"))
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page must hold {begin} and {end}, once each")
    before, after = page.partition(begin)[0], page.partition(end)[2]
    return f"{before}{begin}\n{text}{end}{after}"


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0])
    text = summarise(folder)
    if len(arguments) == 1:
        print(text)
    else:
        page = Path(arguments[1])
        page.write_text(put_between_marks(page.read_text(), folder.name, text))


if __name__ == "__main__":
    main(sys.argv[1:])
