"""GSM8K as conversations, for multi-turn supervised fine-tuning.

    python examples/data_preprocess/gsm8k_multiturn_sft.py --local_dataset_path raw/gsm8k

A row has `messages`: the question, and the dataset's own solution as the assistant's turn.
"""

from typing import Any

from gsm8k import INSTRUCTION, SOURCE
from preparation import command_line, prepare


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    question = {"role": "user", "content": f"{raw['question']} {INSTRUCTION}"}
    solution = {"role": "assistant", "content": raw["answer"]}
    return {"messages": [question, solution]}


if __name__ == "__main__":
    prepare(command_line(__doc__, "~/data/gsm8k_sft").parse_args(), SOURCE, make_row)
