"""GSM8K with a user who says whether the answer is right: the interaction `gsm8k`.

    python examples/data_preprocess/gsm8k_multiturn_w_interaction.py --local_dataset_path raw/gsm8k

The interaction gets the question and the right answer from `extra_info.interaction_kwargs`.
"""

from typing import Any

import gsm8k
from preparation import command_line, prepare

SYSTEM = (
    "You are a math expert. Reason step by step. If the user says that your answer is wrong, find "
    "the mistake and answer again. Put the final answer in the form `#### <answer>`."
)


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    row = gsm8k.make_row(raw, split, index)
    row["prompt"] = [{"role": "system", "content": SYSTEM}, *row["prompt"]]
    row["extra_info"]["interaction_kwargs"] = {
        "name": "gsm8k",
        "query": raw["question"],
        "ground_truth": row["reward_model"]["ground_truth"],
    }
    return row


if __name__ == "__main__":
    prepare(command_line(__doc__, "~/data/gsm8k").parse_args(), gsm8k.SOURCE, make_row)
