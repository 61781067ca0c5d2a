"""GSM8K where the model may check its answer with the tool `calc_gsm8k_reward`.

    python examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_dataset_path raw/gsm8k

The tool gets the right answer of its row from `extra_info.tools_kwargs`. Which agent loop runs is
left to the configuration; `gsm8k_tool_agent_loop.py` writes it into the rows.
"""

from typing import Any

import gsm8k
from preparation import command_line, prepare

SYSTEM = (
    "You are a math expert. Reason step by step. When you have an answer, check it with the tool "
    "`calc_gsm8k_reward` before you give it, and correct it if it is wrong. Put the final answer "
    "in the form `#### <answer>`."
)


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    row = gsm8k.make_row(raw, split, index)
    create_kwargs = {"ground_truth": row["reward_model"]["ground_truth"]}
    row["prompt"] = [{"role": "system", "content": SYSTEM}, *row["prompt"]]
    row["extra_info"] |= {
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": create_kwargs}},
    }
    return row


if __name__ == "__main__":
    prepare(command_line(__doc__, "~/data/gsm8k").parse_args(), gsm8k.SOURCE, make_row)
