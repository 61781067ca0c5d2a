"""Geometry3K where the model may check its answer with the tool `calc_geo3k_reward`.

python examples/data_preprocess/geo3k_multiturn_w_tool.py --local_dataset_path raw/geometry3k
"""

from typing import Any

import geo3k
from preparation import command_line, prepare

SYSTEM = (
    "You are a math expert. Reason step by step. When you have an answer, check it with the tool "
    "`calc_geo3k_reward` before you give it, and correct it if it is wrong."
)


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    row = geo3k.make_row(raw, split, index)
    create_kwargs = {"ground_truth": row["reward_model"]["ground_truth"]}
    row["prompt"] = [{"role": "system", "content": SYSTEM}, *row["prompt"]]
    row["extra_info"] |= {
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_geo3k_reward": {"create_kwargs": create_kwargs}},
    }
    return row


if __name__ == "__main__":
    save_dir = "~/data/geo3k_multiturn_w_tool"
    prepare(command_line(__doc__, save_dir).parse_args(), geo3k.SOURCE, make_row)
