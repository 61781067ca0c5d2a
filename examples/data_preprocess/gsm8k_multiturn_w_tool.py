"""GSM8K for a model that checks its answer with a tool (`verl.tools.gsm8k_tool.Gsm8kTool`).

    python examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_dataset_path raw/gsm8k

Rows name the agent loop `tool_agent`, and the answer that the row's tool compares with. Train with
`multi_turn.tool_config_path=examples/sglang_multiturn/config/tool_config/gsm8k_tool_config.yaml`.
"""

from typing import Any

from gsm8k import INSTRUCTION, SOURCE
from gsm8k import make_row as plain_row
from preparation import command_line, prepare, with_tools

TOOL = "calc_gsm8k_reward"
SYSTEM = (
    "You are a math expert. You are given a question and solve it step by step. Before you give "
    f"your final answer, call the tool `{TOOL}` with it at least once; if the tool says that it is "
    "wrong, think again. Put your final answer in the form `#### <answer>`."
)


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    row = plain_row(raw, split, index)
    answer = row["reward_model"]["ground_truth"]
    row["prompt"] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{raw['question']} {INSTRUCTION}"},
    ]
    return with_tools(row, {TOOL: {"ground_truth": answer}})


if __name__ == "__main__":
    prepare(command_line(__doc__, "~/data/gsm8k_w_tool").parse_args(), SOURCE, make_row)
