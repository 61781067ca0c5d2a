"""Public benchmarks as prompts: `python -m recipe.r1.data_process --task gpqa --source FILE`.

`--source` is a name on the Hugging Face hub or a local file (.csv, .json, .parquet) with the
columns of the benchmark. Choices are shuffled by the number of the row, the same each time.
"""

import argparse
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SOURCES = {
    "gpqa": ("Idavidrein/gpqa", "gpqa_diamond"),
    "aime2024": ("Maxwell-Jia/AIME_2024", None),
}
CHOICE_PROMPT = (
    "Answer the following multiple choice question. The last line of your response should be of "
    "the form 'Answer: X' where X is one of A, B, C, D. Think step by step before answering."
    "\n\n{question}\n\nA) {choices[0]}\nB) {choices[1]}\nC) {choices[2]}\nD) {choices[3]}"
)
MATH_PROMPT = (
    "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
)


def gpqa_row(row: Mapping[str, Any], index: int) -> dict[str, Any]:
    """One question with its four choices in an order of its own."""
    right = row["Correct Answer"]
    choices = [right, *(row[f"Incorrect Answer {number}"] for number in (1, 2, 3))]
    random.Random(index).shuffle(choices)
    text = CHOICE_PROMPT.format(question=row["Question"], choices=choices)
    return as_row("Idavidrein/gpqa", text, "ABCD"[choices.index(right)], index)


def aime_row(row: Mapping[str, Any], index: int) -> dict[str, Any]:
    text = MATH_PROMPT.format(question=row["Problem"])
    return as_row("Maxwell-Jia/AIME_2024", text, str(row["Answer"]), index)


def as_row(source: str, text: str, answer: str, index: int) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": text}],
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "test", "index": index},
    }


TASKS: dict[str, Callable[[Mapping[str, Any], int], dict[str, Any]]] = {
    "gpqa": gpqa_row,
    "aime2024": aime_row,
}


def main() -> None:
    import datasets  # noqa: PLC0415 (an optional package)

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--source", help="a file, or a name on the hub other than the usual one")
    parser.add_argument("--local_dir", type=Path, default=Path("data/r1"))
    options = parser.parse_args()
    name, subset = SOURCES[options.task]
    if options.source and Path(options.source).is_file():
        kind = {"jsonl": "json"}.get(
            Path(options.source).suffix[1:], Path(options.source).suffix[1:]
        )
        rows = datasets.load_dataset(kind, data_files=options.source, split="train")
    else:
        rows = datasets.load_dataset(options.source or name, subset, split="train")
    made = rows.map(TASKS[options.task], with_indices=True, remove_columns=rows.column_names)
    options.local_dir.mkdir(parents=True, exist_ok=True)
    made.to_parquet(options.local_dir / f"{options.task}.parquet")


if __name__ == "__main__":
    main()
