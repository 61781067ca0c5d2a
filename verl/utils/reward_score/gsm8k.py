"""Grade-school mathematics (arXiv:2110.14168): the number after `####` is the answer.

Only the end of a response is looked at, once, from the right; the time does not depend on what the
text says. Numbers are compared as text after commas, currency signs and a trailing point are gone,
as the dataset writes them.
"""

import re

CLIP_CHARACTERS = 300
"""The answer stands at the end; a model that writes more than this after it is not answering."""

METHODS = ("strict", "flexible")
_MARKED = re.compile(r"#### {0,8}(\$?-?\$?[0-9][0-9,]*\.?[0-9]*)")
_NUMBER = re.compile(r"-?\$?[0-9][0-9,]*\.?[0-9]*")


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The answer in a response, or None.

    `strict` wants the last `#### number`; `flexible` takes the last number, wherever it stands.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; it must be one of: {', '.join(METHODS)}")
    pattern = _MARKED if method == "strict" else _NUMBER
    found = pattern.findall(solution_str[-CLIP_CHARACTERS:])
    return plain_number(found[-1]) if found else None


def compute_score(
    solution_str: str,
    ground_truth: str,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for the right answer, `format_score` for a wrong one, 0 where there is none.

    `ground_truth` is the number, or a solution that ends in `#### number`.
    """
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return (
        score if answer == plain_number(str(ground_truth).rpartition("####")[2]) else format_score
    )


def plain_number(text: str) -> str:
    """`$1,234.` and `1234` are the same answer."""
    return text.strip().replace(",", "").replace("$", "").removesuffix(".")
