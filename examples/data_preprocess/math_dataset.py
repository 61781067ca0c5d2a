"""MATH (competition mathematics, arXiv:2103.03874) for reinforcement learning.

    python examples/data_preprocess/math_dataset.py --local_dataset_path raw/math

Raw rows have `problem`, `solution` (the answer in its last \\boxed{}), `level` and `type`.
"""

from typing import Any

from preparation import Source, command_line, prepare

from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed

SOURCE = Source("DigitalLearningGmbH/MATH-lighteval")
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def final_answer(solution: str) -> str:
    boxed = last_boxed_only_string(solution)
    if boxed is None:
        raise ValueError(f"the solution has no \\boxed{{}}: {solution[-80:]!r}")
    return remove_boxed(boxed)


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [{"role": "user", "content": f"{raw['problem']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final_answer(raw["solution"])},
        "extra_info": {"split": split, "index": index},
    }


if __name__ == "__main__":
    prepare(command_line(__doc__, "~/data/math").parse_args(), SOURCE, make_row)
