"""GSM8K (grade-school mathematics, arXiv:2110.14168) for reinforcement learning.

    python examples/data_preprocess/gsm8k.py --local_dataset_path raw/gsm8k

Raw rows have `question` and `answer`, a solution that ends in `#### number`.
"""

from typing import Any

from preparation import Source, command_line, prepare

from verl.utils.reward_score.gsm8k import extract_solution

SOURCE = Source("openai/gsm8k", config_name="main")
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def final_answer(solution: str) -> str:
    answer = extract_solution(solution)
    if answer is None:
        raise ValueError(f"the solution does not end in `#### number`: {solution[-80:]!r}")
    return answer


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    question, solution = raw["question"], raw["answer"]
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final_answer(solution)},
        "extra_info": {"split": split, "index": index, "answer": solution, "question": question},
    }


if __name__ == "__main__":
    prepare(command_line(__doc__, "~/data/gsm8k").parse_args(), SOURCE, make_row)
