"""Mathematics graded by value: 1 if the response's answer equals the ground truth, else 0.

`math_grader` decides, and math-verify what it cannot read (an integral in the box). Where neither
can (a power tower) the score is None, and the response takes no part in training.
"""

import re

from verl.utils.reward_score.math_grader import Abstain, Correct, final_answer
from verl.utils.reward_score.math_verify import grade_or_ask


def compute_score(model_output: str, ground_truth: str) -> tuple[float | None, float, str]:
    """The score, whether an answer was found (1 or 0), and the answer."""
    answer = final_answer(model_output) or bare_expression(model_output)
    if answer is None:
        return 0.0, 0.0, ""
    verdict = grade_or_ask(answer, str(ground_truth))
    if isinstance(verdict, Abstain):
        return None, 1.0, answer
    return float(isinstance(verdict, Correct)), 1.0, answer


MAX_EXPRESSION_CHARACTERS = 1000
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-z]+\*?\}")
_WORD = re.compile(r"(?<!\\)\b[a-zA-Z]{3,}")


def bare_expression(text: str) -> str | None:
    """A response that is nothing but an expression: no box, no marker, no words around it."""
    text = text.strip()
    if not text or len(text) > MAX_EXPRESSION_CHARACTERS or "\\boxed" in text:
        return None
    return None if _WORD.search(_ENVIRONMENT.sub("", text)) else text
