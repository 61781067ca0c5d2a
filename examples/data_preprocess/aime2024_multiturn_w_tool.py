"""AIME 2024 (thirty competition problems) where the model may run code with `code_interpreter`.

    python examples/data_preprocess/aime2024_multiturn_w_tool.py --local_dataset_path raw/aime2024

Raw rows have `ID`, `Problem`, `Solution` and `Answer`, a number from 0 to 999.
"""

from typing import Any

from preparation import Source, command_line, prepare

SOURCE = Source("Maxwell-Jia/AIME_2024")
INSTRUCTION = "Put the final answer in the form `Answer: <answer>` on the last line."


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    answer = str(raw["Answer"])
    create_kwargs = {"ground_truth": answer}
    return {
        "data_source": "aime2024",
        "prompt": [{"role": "user", "content": f"{raw['Problem']}\n\n{INSTRUCTION}"}],
        "ability": "MATH",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {
            "split": split,
            "index": raw["ID"],
            "need_tools_kwargs": True,
            "tools_kwargs": {"code_interpreter": {"create_kwargs": create_kwargs}},
        },
    }


if __name__ == "__main__":
    prepare(command_line(__doc__, "~/data/retool_aime2024").parse_args(), SOURCE, make_row)
