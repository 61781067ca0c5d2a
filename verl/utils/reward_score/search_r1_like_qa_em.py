"""Questions answered with search (Search-R1, arXiv:2503.09516): exact match of the last <answer>.

Both sides are compared without case, punctuation, articles and extra spaces, as in SQuAD. A
response that sprinkles answers over its text gets a quarter of the score.
"""

import string
from collections.abc import Iterable, Mapping
from typing import Any

MAX_ANSWER_TAGS = 10
"""Above this many, a response is fishing for a match."""

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def compute_score(
    solution_str: str,
    ground_truth: Mapping[str, Any],
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` if the last answer is one of `ground_truth["target"]`, else `format_score`.

    0 without an answer. `method` is accepted for compatibility; there is one way to match.
    """
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    if not em_check(answer, ground_truth["target"]):
        return format_score
    num_tags = max(solution_str.count("<answer>"), solution_str.count("</answer>"))
    return score / 4 if num_tags > MAX_ANSWER_TAGS else score


def extract_solution(solution_str: str) -> str | None:
    """What stands in the last <answer>...</answer>, read from left to right; None without one."""
    answer = None
    end = 0
    while (start := solution_str.find("<answer>", end)) >= 0:
        start += len("<answer>")
        close = solution_str.find("</answer>", start)
        if close < 0:
            break
        answer, end = solution_str[start:close], close + len("</answer>")
    return None if answer is None else answer.strip()


def em_check(prediction: str, golden_answers: str | Iterable[str]) -> bool:
    """Whether the prediction is one of the answers."""
    answers = [golden_answers] if isinstance(golden_answers, str) else golden_answers
    normalized = normalize_answer(prediction)
    return any(normalize_answer(answer) == normalized for answer in answers)


def normalize_answer(s: str) -> str:
    words = s.lower().translate(_NO_PUNCTUATION).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))
