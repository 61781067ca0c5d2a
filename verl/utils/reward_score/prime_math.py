"""Mathematics graded by value: 1 if the response's answer equals the ground truth, else 0.

`math_grader` decides; where it cannot (an integral in the box, a power tower) the score is None,
and the response takes no part in training.
"""

from verl.utils.reward_score.math_grader import Abstain, Correct, final_answer, grade


def compute_score(model_output: str, ground_truth: str) -> tuple[float | None, float, str]:
    """The score, whether an answer was found (1 or 0), and the answer."""
    answer = final_answer(model_output)
    if answer is None:
        return 0.0, 0.0, ""
    verdict = grade(answer, str(ground_truth))
    if isinstance(verdict, Abstain):
        return None, 1.0, answer
    return float(isinstance(verdict, Correct)), 1.0, answer
