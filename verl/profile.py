"""Where time and memory of a run went: `python -m verl.profile RUN [--steps A:B] [--top N]`

RUN is a folder with what a run left: its record (`board.sqlite`, trainer.board=True), results of
torch's profiler (`*.json` in global_profiler.save_path), or both. The record gives the time of each
stage and the memory that steps reported; a profile gives the operations below them, by their own
time, without that of the operations they call.
"""

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from verl.board.reader import NoStore, StoreReader, one_run
from verl.utils.user_files import read_json_object

MEMORY = ("perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb", "perf/cpu_memory_used_gb")
CATEGORIES = ("cpu_op", "kernel", "gpu_memcpy", "gpu_memset", "user_annotation")


@dataclass
class Operation:
    """All calls of one name in a profile; times are microseconds."""

    category: str
    name: str
    num_calls: int = 0
    total: float = 0.0
    own: float = 0.0


# ---- the record of a run -------------------------------------------------------------------------


def stage_table(steps: Sequence[Mapping[str, Any]]) -> Table:
    """Seconds of each stage over the steps; the last row is all of them."""
    sums: dict[str, list[float]] = defaultdict(list)
    for entry in steps:
        for stage, seconds in entry["seconds"].items():
            sums[stage].append(float(seconds))
    whole = sum(map(sum, sums.values()))
    table = Table("stage", "per step, s", "largest, s", "share", title="time")
    for stage, seconds in sorted(sums.items(), key=lambda item: -sum(item[1])):
        mean = sum(seconds) / len(steps)
        share = sum(seconds) / whole if whole else 0.0
        table.add_row(stage, f"{mean:.3f}", f"{max(seconds):.3f}", f"{share:.1%}")
    table.add_row("all", f"{whole / len(steps):.3f}", "", "100.0%")
    return table


def memory_table(steps: Sequence[Mapping[str, Any]]) -> Table | None:
    """What steps reported of memory; None if they reported nothing."""
    table = Table("memory", "largest, GB", "in step", title="memory")
    for name in MEMORY:
        found = [
            (float(entry["metrics"][name]), entry["step"])
            for entry in steps
            if name in entry["metrics"]
        ]
        if found:
            most, step = max(found)
            table.add_row(name, f"{most:.3f}", str(step))
    return table if table.row_count else None


def chosen_steps(store: StoreReader, span: str | None) -> list[dict[str, Any]]:
    if re.fullmatch(r"\d+|\d*:\d*", span or ":") is None:
        raise ValueError(f"--steps is {span!r}; write first:last, such as 10:20, or one step")
    first, colon, last = (span or ":").partition(":")
    last = last if colon else first
    steps = [entry for entry in store.steps() if entry["step"] > 0]
    chosen = [
        entry
        for entry in steps
        if int(first or 0) <= entry["step"] and (not last or entry["step"] <= int(last))
    ]
    if not chosen:
        raise ValueError(f"{store.path} has no step in {span or 'it'}")
    return chosen


# ---- results of torch's profiler -----------------------------------------------------------------


def operations(events: Iterable[Mapping[str, Any]]) -> list[Operation]:
    """Operations of a trace by their own time, which is without what they call."""
    lanes: dict[tuple[Any, Any], list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in CATEGORIES:
            lanes[event["pid"], event["tid"]].append(event)
    found: dict[tuple[str, str], Operation] = {}
    for lane in lanes.values():
        for event, own in own_times(lane):
            key = event["cat"], event["name"]
            operation = found.setdefault(key, Operation(*key))
            operation.num_calls += 1
            operation.total += event["dur"]
            operation.own += own
    return sorted(found.values(), key=lambda operation: -operation.own)


def own_times(lane: list[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Each event of a thread, with its time less that of the events directly inside it."""
    inner: list[tuple[Mapping[str, Any], float, list[float]]] = []  # event, end, own time
    for event in sorted(lane, key=lambda event: (event["ts"], -event["dur"])):
        while inner and inner[-1][1] <= event["ts"]:
            done, _, own = inner.pop()
            yield done, own[0]
        if inner:
            inner[-1][2][0] -= event["dur"]
        inner.append((event, event["ts"] + event["dur"], [event["dur"]]))
    for done, _, own in reversed(inner):
        yield done, own[0]


def operation_table(path: Path, num_rows: int) -> Table:
    trace = read_json_object(path)
    found = operations(trace["traceEvents"])
    whole = sum(operation.own for operation in found) or 1.0
    table = Table(
        "operation", "kind", "calls", "own, ms", "with inner, ms", "share", title=path.name
    )
    for one in found[:num_rows]:
        table.add_row(
            one.name[:70],
            one.category,
            str(one.num_calls),
            f"{one.own / 1000:.2f}",
            f"{one.total / 1000:.2f}",
            f"{one.own / whole:.1%}",
        )
    return table


def traces_of(folder: Path, store: StoreReader | None) -> list[Path]:
    """Profiles in the folder, and in the one that the run was told to write them to."""
    folders = [folder] if folder.is_dir() else []
    if store is not None:
        named = store.facts.get("settings", {}).get("global_profiler", {}).get("save_path")
        folders += [Path(named).expanduser()] if named else []
    found = {path for place in folders for path in place.glob("*_rank*.json")}
    return sorted(found)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    folder = Path(options.run).expanduser()
    console = Console()
    try:
        store = None
        try:
            store = one_run(folder)
        except NoStore:
            if not traces_of(folder, None):
                raise
        if store is not None:
            steps = chosen_steps(store, options.steps)
            console.print(stage_table(steps))
            memory = memory_table(steps)
            if memory is not None:
                console.print(memory)
        traces = traces_of(folder, store)
        for path in traces:
            console.print(operation_table(path, options.top))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if not traces:
        sys.stdout.write(
            "no profile of torch here: global_profiler.tool=torch global_profiler.steps=[2] "
            "actor_rollout_ref.actor.profiler.enable=True records one\n"
        )
    return 0


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="python -m verl.profile", description=(__doc__ or "").partition("\n")[0]
    )
    root.add_argument("run", help="folder of a run, or of profiles")
    root.add_argument("--steps", help="first:last, e.g. 10:20, or one step")
    root.add_argument("--top", type=int, default=15, help="operations to list")
    return root


if __name__ == "__main__":
    sys.exit(main())
