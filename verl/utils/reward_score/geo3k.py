"""Geometry with pictures (Geometry3K, arXiv:2105.04165): mostly the answer, a little the format.

The answer is graded by value (`math_verify.grade_or_ask`); a response in the format thinks in
<think> tags and then gives a box.
"""

from verl.utils.reward_score.math_grader import Abstain, Correct, final_answer
from verl.utils.reward_score.math_verify import grade_or_ask


def compute_score(
    predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1
) -> float | None:
    """(1 - f) accuracy + f format; None where the answer cannot be graded."""
    accuracy = acc_reward(predict_str, ground_truth, use_boxed)
    if accuracy is None:
        return None
    return (1.0 - format_score) * accuracy + format_score * format_reward(predict_str)


def format_reward(predict_str: str) -> float:
    """1 for <think>...</think>...\\boxed{...} from the first character on, else 0."""
    thought_end = predict_str.find("</think>")
    box = predict_str.find("\\boxed{", max(thought_end, 0))
    is_complete = thought_end >= 0 and box >= 0 and "}" in predict_str[box:]
    return float(predict_str.startswith("<think>") and is_complete)


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float | None:
    """1 if the answer (in the box, or with `use_boxed` off the whole text) is right, else 0."""
    answer = final_answer(predict_str) if use_boxed else predict_str
    if answer is None:
        return 0.0
    verdict = grade_or_ask(answer, str(ground_truth))
    return None if isinstance(verdict, Abstain) else float(isinstance(verdict, Correct))
