"""DAPO-Math-17k (arXiv:2503.14476) where the model may run code with the tool `code_interpreter`.

    python examples/data_preprocess/dapo_multiturn_w_tool.py --local_dataset_path raw/dapo

Raw rows are in verl's form already (`data_source`, `prompt`, `ability`, `reward_model`,
`extra_info`); they gain the tool's arguments. The dataset repeats each of its problems many times.
"""

from typing import Any

from preparation import Source, command_line, prepare

SOURCE = Source("BytedTsinghua-SIA/DAPO-Math-17k")


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    create_kwargs = {"ground_truth": raw["reward_model"]["ground_truth"]}
    tools = {
        "need_tools_kwargs": True,
        "tools_kwargs": {"code_interpreter": {"create_kwargs": create_kwargs}},
    }
    columns = ("data_source", "prompt", "ability", "reward_model")
    return {name: raw[name] for name in columns} | {"extra_info": {**raw["extra_info"], **tools}}


if __name__ == "__main__":
    prepare(command_line(__doc__, "~/data/retool_dapo").parse_args(), SOURCE, make_row)
