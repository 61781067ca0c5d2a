"""GSM8K with a tool, for the tool agent loop: the rows name it in `agent_name`.

python examples/data_preprocess/gsm8k_tool_agent_loop.py --local_dataset_path raw/gsm8k
"""

from typing import Any

import gsm8k_multiturn_w_tool
from gsm8k import SOURCE
from preparation import command_line, prepare


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    return {**gsm8k_multiturn_w_tool.make_row(raw, split, index), "agent_name": "tool_agent"}


if __name__ == "__main__":
    prepare(command_line(__doc__, "~/data/gsm8k").parse_args(), SOURCE, make_row)
