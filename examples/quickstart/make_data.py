"""Multiplication problems as parquet files in verl's format.

    python examples/quickstart/make_data.py --out runs/quickstart/data --seed 0

A problem is a 4-digit number times a digit with a 5-digit result, `5071*4`. It can be answered at
once or column by column, from the right; a line is digit*factor+carry=carry digit:

    #### 20284                                                          blurted
    1*4+0=04 / 7*4+0=28 / 0*4+2=02 / 5*4+0=20 / #### 20284              worked out

Every demonstration is correct. Held-out problems are in the two files for testing and nowhere else.

    sft_worked_out.parquet   demonstrations, all worked out
    sft_mixed.parquet        demonstrations, two in three blurted
    sft_test.parquet         such demonstrations of held-out problems
    train.parquet            problems for reinforcement learning: only the right answer
    test.parquet             held-out problems
"""

import argparse
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

DATA_SOURCE = "multiplication"
NUM_WORKED_OUT = 8000
NUM_MIXED = 4000
NUM_PROBLEMS = 4096
NUM_HELD_OUT = 256
SHARE_BLURTED = 0.65
"""Of the mixed demonstrations."""

Problem = tuple[int, int]


def question(problem: Problem) -> str:
    return f"{problem[0]}*{problem[1]}"


def blurted(problem: Problem) -> str:
    return f"#### {problem[0] * problem[1]}"


def worked_out(problem: Problem) -> str:
    number, factor = problem
    lines, carry = [], 0
    for digit in map(int, reversed(str(number))):
        product = digit * factor + carry
        lines.append(f"{digit}*{factor}+{carry}={product:02d}")
        carry = product // 10
    return "\n".join([*lines, blurted(problem)])


def rl_row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """A row as `python -m verl.trainer.main_ppo` reads it."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question(problem)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem[0] * problem[1])},
        "extra_info": {"split": split, "index": index},
    }


def sft_rows(
    problems: list[Problem], share_blurted: float, rng: random.Random
) -> list[dict[str, str]]:
    """Rows as `python -m verl.trainer.fsdp_sft_trainer` reads them."""
    num_blurted = round(len(problems) * share_blurted)
    short = set(rng.sample(range(len(problems)), num_blurted))
    return [
        {"prompt": question(p), "response": blurted(p) if i in short else worked_out(p)}
        for i, p in enumerate(problems)
    ]


def make(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    pairs = ((number, factor) for number in range(1000, 10000) for factor in range(2, 10))
    universe = [problem for problem in pairs if problem[0] * problem[1] >= 10000]
    sizes = (NUM_HELD_OUT, NUM_WORKED_OUT, NUM_MIXED, NUM_PROBLEMS)
    chosen = iter(rng.sample(universe, sum(sizes)))
    held_out, shown, mixed, practised = (list(islice(chosen, size)) for size in sizes)
    files = {
        "sft_worked_out": sft_rows(shown, 0.0, rng),
        "sft_mixed": sft_rows(mixed, SHARE_BLURTED, rng),
        "sft_test": sft_rows(held_out, SHARE_BLURTED, rng),
        "train": [rl_row(p, "train", i) for i, p in enumerate(practised)],
        "test": [rl_row(p, "test", i) for i, p in enumerate(held_out)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        parquet.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the quickstart's problems.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.out, arguments.seed)
    print(f"{arguments.out}: {', '.join(sorted(file.name for file in arguments.out.iterdir()))}")
