"""DAPO-Math-17k (arXiv:2503.14476) for a model with a code interpreter.

    python examples/data_preprocess/dapo_multiturn_w_tool.py --local_dataset_path raw/dapo-math-17k

Raw rows are in verl's form already: `prompt`, `data_source`, `ability`, `reward_model`. Rows name
the agent loop `tool_agent` and the tool `code_interpreter`. Train with
`multi_turn.tool_config_path=` and
`examples/sglang_multiturn/config/tool_config/sandbox_fusion_tool_config.yaml`.
"""

from typing import Any

from preparation import Source, command_line, prepare, with_tools

SOURCE = Source("BytedTsinghua-SIA/DAPO-Math-17k", splits={"train": "train"})
TOOL = "code_interpreter"
SYSTEM = (
    "You are a math expert. You are given a question and solve it step by step. Where a "
    f"computation helps, call the tool `{TOOL}` with a Python program that prints what you "
    "need to know."
)


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    answer = raw["reward_model"]["ground_truth"]
    asked = [message for message in raw["prompt"] if message["role"] != "system"]
    row = {
        "data_source": raw["data_source"],
        "prompt": [{"role": "system", "content": SYSTEM}, *asked],
        "ability": raw.get("ability") or "MATH",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "question": asked[-1]["content"]},
    }
    return with_tools(row, {TOOL: {"ground_truth": answer}})


if __name__ == "__main__":
    prepare(command_line(__doc__, "~/data/dapo_w_tool").parse_args(), SOURCE, make_row)
