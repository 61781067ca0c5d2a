"""Exact values of plain numbers: integers, decimals, fractions, and how people write them.

`exact_number` reads what has one meaning in every context: `-5`, `1,234`, `.5`, `3/4`,
`\\frac{3}{4}`, `1.5\\times 10^3`. `32, 349`, `10_2` and `3=5` are not plain numbers. Patterns have
no nested quantifiers and numbers at most `MAX_DIGITS` digits, so the time is bounded.
"""

import re
from fractions import Fraction

MAX_DIGITS = 400

_UNSIGNED = r"(?:\d{1,3}(?:(?:,|\{,\}|,\\!|\\,|\\!)\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_FRACTION = (
    r"\\[dtc]?frac(?:\{\s?(-?\d+)\s?\}\s?\{\s?(\d+)\s?\}|(\d)(\d)|\{(-?\d+)\}(\d)|(\d)\{(\d+)\})"
)
_NUMBER = re.compile(
    rf"([-+]?)\s?(?:({_UNSIGNED})"
    r"(?:e([-+]?\d{1,3})|\s?(?:\\times|\\cdot|\*|×)\s?10\^(?:\{([-+]?\d{1,3})\}|(\d)))?"
    rf"|(\d+)\s?/\s?(\d+)|{_FRACTION})",
    re.ASCII | re.IGNORECASE,
)
_SEPARATORS = re.compile(r"[^\d.]+")
_MINUS_SIGNS = str.maketrans({"−": "-", "–": "-", "﹣": "-", "－": "-"})


def ascii_minus(text: str) -> str:
    """The text with the Unicode minus signs that models write as a hyphen."""
    return text if text.isascii() else text.translate(_MINUS_SIGNS)


def exact_number(text: str) -> Fraction | int | None:
    """The value of a plain number; None for any other text, and for a fraction over zero."""
    if len(text) > MAX_DIGITS:
        return None
    if text.isdecimal() and text.isascii():  # most answers
        return int(text)
    match = _NUMBER.fullmatch(ascii_minus(text).strip())
    if match is None:
        return None
    sign, literal, *exponents, above, below = match.groups()[:7]
    if literal is not None:
        whole, _, decimals = _SEPARATORS.sub("", literal).partition(".")
        value: Fraction | int = int(whole + decimals)
        power = next((int(digits) for digits in exponents if digits is not None), 0)
        power -= len(decimals)
        if power:
            value = value * 10**power if power > 0 else Fraction(value, 10**-power)
    else:
        parts = [part for part in (above, below, *match.groups()[7:]) if part is not None]
        if int(parts[1]) == 0:
            return None
        value = Fraction(int(parts[0]), int(parts[1]))
    return -value if sign == "-" else value
