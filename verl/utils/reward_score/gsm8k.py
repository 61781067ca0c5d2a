"""Grade-school mathematics (arXiv:2110.14168): the number after `####` is the answer.

Only the end of a response is looked at, in time that does not depend on what the text says. The
answer must be one number: `5/2`, `5 or 6` and `5e3` are not the answer 5. A unit may follow it, and
thousands separators, currency signs and a trailing point do not matter; numbers are compared by
value.
"""

import re

from verl.utils.reward_score.math_grader.numbers import ascii_minus, exact_number

CLIP_CHARACTERS = 300
"""The answer stands at the end; a model that writes more than this after it is not answering."""

METHODS = ("strict", "flexible")
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = rf"(?:{_DIGITS})(?:e[-+]?[0-9]{{1,9}}|/[0-9]+(?:\.[0-9]+)?)?"
_MARKED = re.compile(rf"[\s*`({{]*([-+]?\s?\\?[$£€¥]?\s?[-+]?(?:{_NUMBER}))([^\n]*)", re.IGNORECASE)
_ANYWHERE = re.compile(rf"(?:(?<![\w)\]])[-+])?(?:[$£€¥][-+]?)?(?:{_NUMBER})", re.IGNORECASE)
_ASIDE = re.compile(r"\s*(?:[(\[]|<[|/])|[.!?]\s|\s*\*\*|[.!?]?\s*$")
_AREA_OR_VOLUME = re.compile(r"\b(?:m|cm|mm|km|ft|in|yd|mi)\^?[23]\b")
_NOT_A_UNIT = re.compile(
    r"\s*(?:[-+*/^=<>:_×÷~|&¼-¾⅐-⅞²³¹⁰-⁹]|(?:or|and|to|x|plus|minus|over|half|dozen|hundred|k"
    r"|thousand|million|billion)\b)|.*\d",
    re.IGNORECASE,
)
_HEDGE = re.compile(r"\b(?:or|maybe|perhaps)\b[^a-z0-9]{0,4}[0-9]", re.IGNORECASE)


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The answer in a response, or None.

    `strict` reads what follows the last `####` with a number, and returns all of it where that is
    more than a number with a unit; `flexible` takes the last number, wherever it stands.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; it must be one of: {', '.join(METHODS)}")
    end = ascii_minus(solution_str[-CLIP_CHARACTERS:])
    if method == "flexible":
        numbers = _ANYWHERE.findall(end)
        return plain_number(numbers[-1]) if numbers else None
    for marked in reversed(end.split("####")[1:]):
        match = _MARKED.match(marked.partition("\n")[0])
        if match is not None:
            number, rest = match.groups()
            return plain_number(number) if _is_unit(rest) else (number + rest).strip()
    return None


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
    gold = plain_number(str(ground_truth).rpartition("####")[2])
    value = exact_number(answer)
    is_right = answer == gold or (value is not None and value == exact_number(gold))
    return score if is_right else format_score


def plain_number(text: str) -> str:
    """`$1,234.` and `1234` are the same answer."""
    text = re.sub(r"[\s,$£€¥\\]", "", ascii_minus(text))
    return text.removesuffix(".").removeprefix("+")


def _is_unit(rest: str) -> bool:
    """Whether what follows a number leaves it the answer: a unit, a full stop, a remark."""
    if _HEDGE.search(rest):
        return False
    unit = _ASIDE.split(rest, maxsplit=1)[0]
    return not _NOT_A_UNIT.match(_AREA_OR_VOLUME.sub("", unit))
