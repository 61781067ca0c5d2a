"""What the batch protocol costs beyond the tensors in it.

    python benchmarks/protocol.py

measures the operations of `DataProto` on 10,000 and 100,000 rows of 20 columns against the same
work on a plain dictionary of tensors, in turns, and reports the medians of the CPU times and their
ratio. Object columns are measured on their own, against a dictionary of NumPy arrays. The table is
also written to `benchmarks/results/protocol.json`.
"""

import argparse
import gc
import io
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from verl import DataProto

RESULTS = Path(__file__).parent / "results" / "protocol.json"
DTYPES = (torch.int64, torch.float32, torch.bool)
WIDTHS = (8, 16, 24, 32, 64)
NUM_COLUMNS = 20
MIN_RUN_SECONDS = 0.02

Work = Callable[[Any], Any]


@dataclass
class Operation:
    """The same work twice, each on what its `prepare` makes outside the clock."""

    name: str
    prepare_ours: Callable[[], Any]
    ours: Work
    prepare_plain: Callable[[], Any]
    plain: Work
    is_repeatable: bool = True
    """False where a second call on the same argument is other work than the first."""


@dataclass
class Timing:
    """Medians over the runs, in milliseconds of CPU time per call."""

    operation: str
    rows: int
    ours_ms: float
    plain_ms: float
    ratio: float
    runs: int


# ---- the data ------------------------------------------------------------------------------------


def tensor_columns(num_rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    columns = {}
    for number in range(NUM_COLUMNS):
        dtype, width = DTYPES[number % len(DTYPES)], WIDTHS[number % len(WIDTHS)]
        numbers = torch.randint(0, 2**15, (num_rows, width), generator=generator)
        columns[f"column_{number:02d}"] = (
            (numbers % 2).bool() if dtype == torch.bool else numbers.to(dtype)
        )
    return columns


def object_columns(num_rows: int) -> dict[str, np.ndarray]:
    """A label, a graded answer and a chat, as in a training batch."""
    makers: dict[str, Callable[[int], Any]] = {
        "uid": lambda row: f"prompt-{row // 4}",
        "reward_model": lambda row: {"style": "rule", "ground_truth": str(row)},
        "raw_prompt": lambda row: [{"role": "user", "content": f"What is {row} + 1?"}],
    }
    return {
        name: np.fromiter((make(row) for row in range(num_rows)), dtype=object)
        for name, make in makers.items()
    }


# ---- the work ------------------------------------------------------------------------------------


def tensor_operations(columns: dict[str, torch.Tensor]) -> list[Operation]:
    data = DataProto.from_dict(columns)
    names = list(columns)
    head = names[: NUM_COLUMNS // 2]
    # Two columns are in both halves, as copies, so that a union has something to compare.
    tail = {name: columns[name].clone() for name in names[NUM_COLUMNS // 2 - 2 :]}
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))
    some = order[: len(data) // 2]
    return [
        Operation(
            "concat 4 parts",
            lambda: data.chunk(4),
            DataProto.concat,
            lambda: chunk_plain(columns, 4),
            concat_plain,
        ),
        Operation(
            "chunk into 8",
            lambda: data,
            lambda d: d.chunk(8),
            lambda: columns,
            lambda c: chunk_plain(c, 8),
        ),
        Operation(
            "select 10 columns",
            lambda: data,
            lambda d: d.select(batch_keys=head),
            lambda: columns,
            lambda c: {name: c[name] for name in head},
        ),
        Operation(
            "select_idxs, half of the rows",
            lambda: data,
            lambda d: d.select_idxs(some),
            lambda: columns,
            lambda c: {name: column.index_select(0, some) for name, column in c.items()},
        ),
        Operation(
            "union",
            lambda: (data.select(batch_keys=head), DataProto.from_dict(tail)),
            lambda pair: pair[0].union(pair[1]),
            lambda: ({name: columns[name] for name in head}, tail),
            lambda pair: union_plain(*pair),
            is_repeatable=False,
        ),
        Operation(
            "repeat 2, interleaved",
            lambda: data,
            lambda d: d.repeat(2),
            lambda: columns,
            lambda c: {name: column.repeat_interleave(2, 0) for name, column in c.items()},
        ),
        Operation(
            "reorder",
            data.select,
            lambda d: d.reorder(order),
            lambda: dict(columns),
            lambda c: c.update({name: column.index_select(0, order) for name, column in c.items()}),
        ),
        # Against arrays, the harder comparison: torch pickles its tensors more slowly.
        Operation(
            "send and receive",
            lambda: data,
            round_trip,
            lambda: {name: column.numpy() for name, column in columns.items()},
            round_trip,
        ),
        Operation(
            "send and receive, out of band",
            lambda: data,
            round_trip_out_of_band,
            lambda: {name: column.numpy() for name, column in columns.items()},
            round_trip_out_of_band,
        ),
    ]


def object_operations(arrays: dict[str, np.ndarray]) -> list[Operation]:
    data = DataProto.from_dict(non_tensors=dict(arrays))
    order = np.random.default_rng(1).permutation(len(data))
    return [
        Operation(
            "objects: concat 4 parts",
            lambda: data.chunk(4),
            DataProto.concat,
            lambda: [{name: np.split(a, 4)[i] for name, a in arrays.items()} for i in range(4)],
            lambda parts: {name: np.concatenate([p[name] for p in parts]) for name in parts[0]},
        ),
        Operation(
            "objects: reorder",
            data.select,
            lambda d: d.reorder(order),
            lambda: dict(arrays),
            lambda c: c.update({name: array[order] for name, array in c.items()}),
        ),
        Operation(
            "objects: repeat 2, interleaved",
            lambda: data,
            lambda d: d.repeat(2),
            lambda: arrays,
            lambda c: {name: array.repeat(2) for name, array in c.items()},
        ),
        Operation(
            "objects: send and receive", lambda: data, round_trip, lambda: arrays, round_trip
        ),
    ]


def chunk_plain(columns: dict[str, torch.Tensor], chunks: int) -> list[dict[str, torch.Tensor]]:
    pieces = [column.chunk(chunks) for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*pieces, strict=True)]


def concat_plain(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def union_plain(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    for name, column in right.items():
        if name in left and not torch.equal(left[name], column):
            raise ValueError(name)
    left.update(right)


def round_trip(value: Any) -> Any:
    """As `multiprocessing` sends an object."""
    return ForkingPickler.loads(ForkingPickler.dumps(value, protocol=5))


def round_trip_out_of_band(value: Any) -> Any:
    """As a transport with shared memory sends it: only the frame is copied."""
    buffers: list[Any] = []
    frame = io.BytesIO()
    ForkingPickler(frame, 5, True, buffers.append).dump(value)
    return ForkingPickler.loads(frame.getvalue(), buffers=buffers)


# ---- the clock -----------------------------------------------------------------------------------


def measure(operation: Operation, num_rows: int, runs: int) -> Timing:
    """Alternate between the two, so that whatever else the machine does strikes both."""
    loops = num_loops(operation)
    ours, plain = [], []
    for _ in range(runs):
        ours.append(seconds_per_call(operation.prepare_ours, operation.ours, loops))
        plain.append(seconds_per_call(operation.prepare_plain, operation.plain, loops))
    mine, theirs = statistics.median(ours), statistics.median(plain)
    return Timing(operation.name, num_rows, mine * 1e3, theirs * 1e3, mine / theirs, runs)


def num_loops(operation: Operation) -> int:
    """Enough calls that the quicker side runs for a while; the first call only warms up."""
    if not operation.is_repeatable:
        return 1
    seconds_per_call(operation.prepare_ours, operation.ours, 1)
    once = seconds_per_call(operation.prepare_ours, operation.ours, 1)
    return max(1, int(MIN_RUN_SECONDS / max(once, 1e-6)))


def seconds_per_call(prepare: Callable[[], Any], work: Work, loops: int) -> float:
    argument = prepare()
    gc.disable()
    start = time.process_time()
    for _ in range(loops):
        work(argument)
    elapsed = time.process_time() - start
    gc.enable()
    return elapsed / loops


# ---- the report ----------------------------------------------------------------------------------


def sent_sizes(columns: dict[str, torch.Tensor]) -> dict[str, float]:
    num_rows = len(next(iter(columns.values())))
    raw = sum(column.numel() * column.element_size() for column in columns.values())
    sent = len(ForkingPickler.dumps(DataProto.from_dict(columns), protocol=5))
    return {
        "raw_bytes_per_row": raw / num_rows,
        "sent_bytes_per_row": sent / num_rows,
        "ratio": sent / raw,
    }


def show(timings: list[Timing], sizes: dict[str, float], console: Console) -> None:
    table = Table("operation", "rows", "DataProto ms", "plain ms", "ratio")
    for timing in timings:
        ratio = f"{timing.ratio:.2f}"
        table.add_row(
            timing.operation,
            f"{timing.rows:,}",
            f"{timing.ours_ms:.4g}",
            f"{timing.plain_ms:.4g}",
            ratio,
        )
    console.print(table)
    console.print(
        f"sent: {sizes['sent_bytes_per_row']:.1f} bytes per row for "
        f"{sizes['raw_bytes_per_row']:.1f} raw bytes ({sizes['ratio']:.4f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--runs", type=int, default=9, help="runs of each side, at least 7")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    timings: list[Timing] = []
    sizes: dict[str, float] = {}
    for num_rows in options.rows:
        columns = tensor_columns(num_rows)
        sizes = sent_sizes(columns)
        operations = tensor_operations(columns) + object_operations(object_columns(num_rows))
        timings += [measure(operation, num_rows, options.runs) for operation in operations]
    show(timings, sizes, Console())
    report = {
        "command": "python " + " ".join(["benchmarks/protocol.py", *sys.argv[1:]]),
        "versions": {name: version(name) for name in ("torch", "tensordict", "numpy")}
        | {"python": platform.python_version()},
        "threads": 1,
        "columns": NUM_COLUMNS,
        "timings": [asdict(timing) for timing in timings],
        "sent": sizes,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
