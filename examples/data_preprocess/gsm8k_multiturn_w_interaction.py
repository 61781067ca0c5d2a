"""GSM8K with a simulated user who says whether the answer is right (`Gsm8kInteraction`).

    python examples/data_preprocess/gsm8k_multiturn_w_interaction.py --local_dataset_path raw/gsm8k

Rows name the agent loop `tool_agent`, the interaction `gsm8k` and the answer it compares with.
Train with `multi_turn.interaction_config_path=` and
`examples/sglang_multiturn/config/interaction_config/gsm8k_interaction_config.yaml`.
"""

from typing import Any

from gsm8k import INSTRUCTION, SOURCE
from gsm8k import make_row as plain_row
from preparation import command_line, prepare

SYSTEM = (
    "You are a math expert. You are given a question and solve it step by step. If you are told "
    "that your answer is wrong, find the mistake and answer again. Put your final answer in the "
    "form `#### <answer>`."
)


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    row = plain_row(raw, split, index)
    answer = row["reward_model"]["ground_truth"]
    row["prompt"] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{raw['question']} {INSTRUCTION}"},
    ]
    row["agent_name"] = "tool_agent"
    row["extra_info"]["interaction_kwargs"] = {
        "name": "gsm8k",
        "query": raw["question"],
        "ground_truth": answer,
    }
    return row


if __name__ == "__main__":
    prepare(command_line(__doc__, "~/data/gsm8k_w_interaction").parse_args(), SOURCE, make_row)
