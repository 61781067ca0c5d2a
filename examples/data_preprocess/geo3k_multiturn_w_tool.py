"""Geometry3K for a model that checks its answer with a tool (`verl.tools.geo3k_tool.Geo3kTool`).

    python examples/data_preprocess/geo3k_multiturn_w_tool.py --local_dataset_path raw/geometry3k

Rows name the agent loop `tool_agent`, and the answer that the row's tool compares with. Train with
`multi_turn.tool_config_path=examples/sglang_multiturn/config/tool_config/geo3k_tool_config.yaml`.
"""

from typing import Any

from geo3k import SOURCE
from geo3k import make_row as plain_row
from preparation import command_line, prepare, with_tools

TOOL = "calc_geo3k_reward"
SYSTEM = (
    "You are a math expert. You are given a question with a picture and solve it step by step. "
    f"Before you give your final answer, call the tool `{TOOL}` with it at least once; if the tool "
    "says that it is wrong, think again. Put your final answer in \\boxed{}."
)


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    row = plain_row(raw, split, index)
    row["prompt"] = [{"role": "system", "content": SYSTEM}, *row["prompt"]]
    return with_tools(row, {TOOL: {"ground_truth": raw["answer"]}})


if __name__ == "__main__":
    prepare(command_line(__doc__, "~/data/geo3k_w_tool").parse_args(), SOURCE, make_row)
