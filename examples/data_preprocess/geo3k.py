"""Geometry3K (geometry with pictures, arXiv:2105.04165) for reinforcement learning.

    python examples/data_preprocess/geo3k.py --local_dataset_path raw/geometry3k

Raw rows have `problem` with `<image>` where the picture belongs, `answer` and `images`.
"""

from typing import Any

from preparation import Source, command_line, prepare

SOURCE = Source("hiyouga/geometry3k")
INSTRUCTION = (
    "First think about the reasoning process as an inner monologue within <think> </think> tags, "
    "then give the final answer in \\boxed{}."
)


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    problem, answer = raw["problem"], raw["answer"]
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": f"{problem} {INSTRUCTION}"}],
        "images": raw["images"],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": problem},
    }


if __name__ == "__main__":
    prepare(command_line(__doc__, "~/data/geo3k").parse_args(), SOURCE, make_row)
