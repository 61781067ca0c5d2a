"""How fast prompts are opened, checked and read, and how much memory a dataset needs.

    python benchmarks/dataset.py

writes files of 10,000, 100,000 and 1,000,000 prompts, opens each in a process of its own, and
reports rows per second of CPU time (opening with all checks, reading in order, reading in random
order, and measuring prompts for the length filter) and memory: what the process holds itself, and
the pages of mapped files that it looked at, which the machine may take back. The table is also
written to `benchmarks/results/dataset.json`.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results" / "dataset.json"
SIZES = (10_000, 100_000, 1_000_000)
NUM_READ = 20_000
NUM_MEASURED = 5_000
QUESTION = "A train leaves at {a} and travels {b} miles at {c} miles per hour. " * 3
RATES = ("open_and_check", "in_order", "at_random", "measure")


def row(number: int) -> dict[str, Any]:
    question = QUESTION.format(a=number % 24, b=number, c=number % 97 + 1)
    return {
        "data_source": "trains",
        "prompt": [
            {"role": "system", "content": "Reason step by step."},
            {"role": "user", "content": question},
        ],
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"split": "train", "index": number},
    }


def write(path: Path, num_rows: int) -> None:
    """In pieces, so that writing needs no more memory than reading."""
    starts = range(0, num_rows, 10_000)
    pieces = ([row(n) for n in range(start, min(start + 10_000, num_rows))] for start in starts)
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            for piece in pieces:
                file.writelines(json.dumps(entry) + "\n" for entry in piece)
        return
    schema = pa.Table.from_pylist([row(0)]).schema
    with pq.ParquetWriter(path, schema) as writer:
        for piece in pieces:
            writer.write_table(pa.Table.from_pylist(piece, schema))


def memory_mb() -> dict[str, float]:
    """What this process holds by itself, and which mapped pages are in memory."""
    status = Path("/proc/self/status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return {
        name: round(int(lines[key].split()[0]) / 1024, 1)
        for name, key in (("own", "RssAnon"), ("mapped", "RssFile"))
    }


def measure(path: str) -> dict[str, Any]:
    """Runs in a process of its own."""
    from examples.quickstart.build_model import build_tokenizer
    from verl.config.data import DataConfig
    from verl.utils.dataset import RLHFDataset

    config = DataConfig(truncation="left", cache_dir=str(Path(path).parent / "cache"))
    tokenizer = build_tokenizer()
    before = memory_mb()
    start = time.process_time()
    dataset = RLHFDataset(path, tokenizer, config)
    seconds = {"open_and_check": (len(dataset), time.process_time() - start)}
    after = memory_mb()
    count = min(NUM_READ, len(dataset))
    orders = {
        "in_order": np.arange(count),
        "at_random": np.random.default_rng(0).permutation(len(dataset))[:count],
    }
    for name, order in orders.items():
        start = time.process_time()
        for item in order:
            dataset[int(item)]
        seconds[name] = (count, time.process_time() - start)
    start = time.process_time()
    for item in range(NUM_MEASURED):
        dataset._length_fault(dataset.dataframe[item])
    seconds["measure"] = (NUM_MEASURED, time.process_time() - start)
    return {
        "rows": len(dataset),
        "rows_per_second": {name: round(n / spent) for name, (n, spent) in seconds.items()},
        "open_seconds": round(seconds["open_and_check"][1], 2),
        "memory_added_mb": {name: round(after[name] - before[name], 1) for name in after},
        "memory_at_end_mb": memory_mb(),
    }


def show(results: list[dict[str, Any]]) -> None:
    table = Table(title="prompts: rows per second, and MB of memory that opening added")
    for name in ("format", "rows", *RATES, "own MB", "mapped MB", "file MB"):
        table.add_column(name.replace("_", " "), justify="right")
    for result in results:
        rates = [f"{result['rows_per_second'][name]:,}" for name in RATES]
        added = [f"{result['memory_added_mb'][name]:.0f}" for name in ("own", "mapped")]
        size = f"{result['file_mb']:.0f}"
        table.add_row(result["format"], f"{result['rows']:,}", *rates, *added, size)
    Console(width=120).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the JSON")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return 0
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for suffix in ("parquet", "jsonl"):
            for num_rows in options.sizes:
                path = Path(folder) / f"rows_{num_rows}.{suffix}"
                write(path, num_rows)
                command = [sys.executable, __file__, "--measure", str(path)]
                found = subprocess.run(
                    command, check=True, capture_output=True, text=True, timeout=3600
                )
                size = round(path.stat().st_size / 2**20, 1)
                measured = json.loads(found.stdout.splitlines()[-1])
                results.append({"format": suffix, "file_mb": size, **measured})
                path.unlink()
    show(results)
    report = {
        "command": "python benchmarks/dataset.py",
        "versions": {name: version(name) for name in ("pyarrow", "numpy", "transformers")},
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "results": results,
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
