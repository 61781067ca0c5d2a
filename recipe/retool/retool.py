"""ReTool (arXiv:2504.11536): mathematics with a code interpreter. Dataset and score of the recipe.

Used by `data.custom_cls.{path,name}` and `custom_reward_function.{path,name}`. The score is the
paper's: 1 for an answer that equals the reference, -1 for another; running code earns nothing.
"""

from typing import Any

from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.reward_score import math_dapo

ANSWER_FORMAT = "\nThe answer format must be: \\boxed{'The final answer goes here.'}"


class CustomRLHFDataset(RLHFDataset):
    """Rows of a mathematics dataset whose prompts ask for a boxed answer and run the tool loop."""

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(super().__getitem__(item))
        messages = [dict(message) for message in row["raw_prompt"]]
        if not str(messages[-1]["content"]).endswith(ANSWER_FORMAT):
            messages[-1]["content"] = f"{messages[-1]['content']}{ANSWER_FORMAT}"
        return {**row, "raw_prompt": messages, "agent_name": "tool_agent"}


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, Any]:
    """1 or -1, and how many turns it took."""
    found = math_dapo.compute_score(solution_str, str(ground_truth), strict_box_verify=True)
    return {**found, "num_turns": float((extra_info or {}).get("num_turns", 0))}
