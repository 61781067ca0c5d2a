"""DAPO's rule for mathematics (arXiv:2503.14476): 1 for the right answer, -1 for any other.

The answer is what follows the last "Answer:" near the end of the response, compared as text after
the normalisation of Minerva (arXiv:2206.14858, appendix G); or, with `strict_box_verify`, the text
in the last box exactly. Beyond Minerva's rules, wrappers such as \\boxed and \\text are opened
whatever braces they hold, and a final stop, bold marks and Unicode minus signs do not matter. Only
the end is looked at, with fixed strings and patterns that cannot backtrack, so the time is bounded.
"""

import re
from collections.abc import Sequence
from typing import Any

from verl.utils.reward_score.math_grader.grade import last_boxed, unboxed
from verl.utils.reward_score.math_grader.numbers import ascii_minus, exact_number
from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed

__all__ = ["compute_score", "last_boxed_only_string", "remove_boxed"]

CLIP_CHARACTERS = 300
"""Answers stand at the end; also the most a response can cost."""

MAX_ANSWER_CHARACTERS = 10_000
"""A longer text is no answer and is not normalised."""

NO_ANSWER = "[INVALID]"
_ANSWER = re.compile(r"(?i)answer\s{0,9}:\s{0,9}([^\n]+)")

_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"), ("dfrac", "frac"),
    ("tfrac", "frac"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units",
    "\\ldots", "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm",
    "pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples",
    "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}",
    "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_WRAPPER = r"\\(?:text|textbf|overline|boxed|fbox)\{"
_BRACE = re.compile(_WRAPPER + r"|\\.|[{}]", re.DOTALL)
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_SPACED_COMMA = re.compile(r"[0-9],\s+[0-9]")
_FRACTION = re.compile(r"frac([^{])(.)")
_ROOT = re.compile(r"sqrt([^{\[])")


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False
) -> dict[str, Any]:
    """`score` 1 or -1, `acc` whether it is right, `pred` the answer that was found."""
    end = solution_str[-CLIP_CHARACTERS:]
    verify = is_correct_strict_box if strict_box_verify else is_correct_minerva
    is_correct, answer = verify(end, str(ground_truth))
    return {"score": 1.0 if is_correct else -1.0, "acc": is_correct, "pred": answer}


def is_correct_minerva(solution_str: str, gt: str) -> tuple[bool, str]:
    """Whether the last "Answer:" gives the ground truth, and what it gives."""
    found = _ANSWER.findall(solution_str)
    answer = normalize_final_answer(found[-1]) if found else NO_ANSWER
    gold = normalize_final_answer(gt)
    if not gold and found:  # it is one of the words that are removed, such as square
        answer, gold = (normalize_final_answer(text, removed=()) for text in (found[-1], gt))
    return answer == gold, answer


def is_correct_strict_box(pred: str, gt: str) -> tuple[bool, str]:
    """Whether the last box holds the ground truth, character by character, and what it holds."""
    box = last_boxed(pred)
    answer = NO_ANSWER if box is None else unboxed(box)
    return answer == gt, answer


def normalize_final_answer(final_answer: str, *, removed: Sequence[str] = _REMOVED) -> str:
    """The spelling in which answers are compared, without the words that are `removed`."""
    if len(final_answer) > MAX_ANSWER_CHARACTERS:
        return final_answer
    text = _without_name(" ".join(ascii_minus(final_answer).split()))
    is_list = _SPACED_COMMA.search(text) is not None  # 32, 349 is two numbers, 32,349 is one
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for word in removed:
        text = text.replace(word, "")
    before, opening, rest = text.partition("$")
    formula, closing, _ = rest.partition("$")
    text = formula if closing else before + opening + rest
    text = _unwrapped(text)
    text = _FRACTION.sub(_braced_fraction, text)
    text = _ROOT.sub(r"sqrt{\1}", text).replace("$", "").strip().strip("*").rstrip(".").strip()
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) and not is_list else text


def _without_name(text: str) -> str:
    """What the last equals sign gives: 5 for x = 5 and for 2 + 3 = 5, but 3 = 5 is no 5."""
    name, _, value = text.rpartition("=")
    left, right = exact_number(name), exact_number(value)
    return text if left is not None and right is not None and left != right else value


def _unwrapped(text: str) -> str:
    """The text without \\boxed{...}, \\text{...} and the like around what they hold."""
    pieces: list[str] = []
    is_wrapper: list[bool] = []  # of each brace that is open
    end = 0
    for match in _BRACE.finditer(text):
        token = match.group()
        if token == "}":
            is_dropped = bool(is_wrapper) and is_wrapper.pop()
        elif token.endswith("{") and token != "\\{":
            is_dropped = token != "{"
            is_wrapper.append(is_dropped)
        else:
            continue
        pieces.append(text[end : match.start()] if is_dropped else text[end : match.end()])
        end = match.end()
    return "".join(pieces) + text[end:]


def _braced_fraction(match: re.Match[str]) -> str:
    over, under = match.groups()
    return f"frac{{{over}}}{under}" if under == "{" else f"frac{{{over}}}{{{under}}}"
