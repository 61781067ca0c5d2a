"""Competition mathematics (MATH, arXiv:2103.03874): the last box must read like the gold answer.

The comparison is of texts, after both are brought into one spelling: what \\dfrac, spaces, units on
the right and a missing leading zero change is undone. It proves nothing about values: 0.25 and
\\frac{1}{4} differ here. `math_grader` compares values.
"""

import re

from verl.utils.reward_score.math_grader.grade import MAX_BOX_CHARACTERS, last_boxed, unboxed
from verl.utils.reward_score.math_grader.numbers import ascii_minus, exact_number

_DROPPED = ("\\!", "\\left", "\\right", "^{\\circ}", "^\\circ", "\\$", "\\%", "%")
_SHORT_FRACTION = re.compile(r"\\frac([^{\\])(.)")
_SHORT_ROOT = re.compile(r"\\sqrt([^{\[\\])")
_UNIT = re.compile(r"(?!(?:or|and)\b)[^0-9]*(?:\}(?:\^\{?[23]\}?)?\s*)?\Z")
_SLASH = re.compile(r"(-?[0-9]+)/(-?[0-9]+)")


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1 if the last box of the solution is the ground truth up to spelling, else 0."""
    box = last_boxed_only_string(solution_str)
    return float(box is not None and is_equiv(remove_boxed(box), str(ground_truth)))


def last_boxed_only_string(string: str) -> str | None:
    """The last \\boxed{...} (or \\fbox{...}) of a text, command included."""
    return last_boxed(string)


def remove_boxed(s: str) -> str:
    """What stands in a box."""
    return unboxed(s)


def is_equiv(str1: str | None, str2: str | None) -> bool:
    """Whether two answers are spelled the same; no answer is only equal to no answer."""
    if str1 is None or str2 is None:
        return str1 is str2
    one, other = strip_string(str1), strip_string(str2)
    return one == other if one and other else str1.strip() == str2.strip()


def strip_string(string: str) -> str:
    """The spelling in which answers are compared; a text too long for a box is left as it is."""
    if len(string) > MAX_BOX_CHARACTERS:
        return string
    string = " ".join(ascii_minus(string).split())
    for dropped in _DROPPED:
        string = string.replace(dropped, "")
    string = string.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    value, text, unit = string.partition("\\text{ ")
    string = value if _UNIT.match(unit) else value + text + unit
    string = string.replace(" .", " 0.").replace("{.", "{0.")
    if string.startswith("."):
        string = "0" + string
    name, equals, value = string.partition("=")
    if equals and "=" not in value and len(name.strip()) <= 2 and exact_number(name) is None:
        string = value
    string = _SHORT_ROOT.sub(r"\\sqrt{\1}", string).replace(" ", "")
    string = _SHORT_FRACTION.sub(_long_fraction, string)
    if string == "0.5":
        string = "\\frac{1}{2}"
    slash = _SLASH.fullmatch(string)
    return f"\\frac{{{slash.group(1)}}}{{{slash.group(2)}}}" if slash else string


def _long_fraction(match: re.Match[str]) -> str:
    """\\frac12 and \\frac1{72} with the braces they may leave out."""
    over, under = match.groups()
    return f"\\frac{{{over}}}{under}" if under == "{" else f"\\frac{{{over}}}{{{under}}}"
