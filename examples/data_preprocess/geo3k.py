"""Geometry3K (arXiv:2105.04165): geometry problems with a drawing.

    python examples/data_preprocess/geo3k.py --local_dataset_path raw/geometry3k

Raw rows have `images`, `problem` (with `<image>` where the drawing belongs) and `answer`.
"""

from typing import Any

from preparation import Source, command_line, prepare

SOURCE = Source("hiyouga/geometry3k")
INSTRUCTION = (
    "First think about the problem as an inner monologue, then give the final answer. The thinking "
    "must be enclosed in <think> </think> tags, and the final answer must be put in \\boxed{}."
)


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    problem, answer = raw["problem"], raw["answer"]
    num_places, num_images = problem.count("<image>"), len(raw["images"])
    if num_places != num_images:
        raise ValueError(f"the problem has {num_places} places for {num_images} images")
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
