"""Sums of two numbers from 1 to 20 as parquet files in verl's format.

    python examples/smollm2/make_data.py --out runs/smollm2/data

400 problems: 64 held out in test.parquet, the others in train.parquet.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

DATA_SOURCE = "sums"
NUM_HELD_OUT = 64


def row(a: int, b: int, split: str, index: int) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "You add numbers."},
        {"role": "user", "content": f"Compute {a} + {b}. Reply with just the result."},
    ]
    return {
        "data_source": DATA_SOURCE,
        "prompt": messages,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": split, "index": index},
    }


def make(folder: Path, seed: int) -> None:
    problems = [(a, b) for a in range(1, 21) for b in range(1, 21)]
    random.Random(seed).shuffle(problems)
    parts = {"test": problems[:NUM_HELD_OUT], "train": problems[NUM_HELD_OUT:]}
    folder.mkdir(parents=True, exist_ok=True)
    for split, part in parts.items():
        rows = [row(a, b, split, index) for index, (a, b) in enumerate(part)]
        parquet.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the problems.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.out, arguments.seed)
