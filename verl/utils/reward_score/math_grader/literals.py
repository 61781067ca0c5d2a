"""Numbers as they are written: 12, 0.5, 1.5e3, 0.1(6), 1011_2. All of them exact."""

import re
from fractions import Fraction

from verl.utils.reward_score.math_grader.limits import Malformed, TooLarge
from verl.utils.reward_score.math_grader.nodes import Number
from verl.utils.reward_score.math_grader.vocabulary import NUMBER_WORDS

MAX_EXPONENT = 2000
_SIMPLE = re.compile(
    r"\s{0,9}(-?)\s{0,9}(?:"
    r"(?P<whole>[0-9]{1,99})(?:\.(?P<decimals>[0-9]{1,99}))?"
    r"|(?P<grouped>[0-9]{1,3}(?:,[0-9]{3}){1,20})"
    r"|(?:\\[dt]?frac\{)(?P<numerator>[0-9]{1,99})\}\{(?P<denominator>[0-9]{1,99})\}"
    r"|(?P<over>[0-9]{1,99})/(?P<under>[0-9]{1,99})"
    r")\s{0,9}"
)


def simple_number(text: str) -> Fraction | int | None:
    """The value of an integer, a decimal or a fraction of integers; None for anything else.

    Most answers are of this kind, and this is ten times faster than the parser. 1,234 is left to
    the parser where it could be two numbers.
    """
    match = _SIMPLE.fullmatch(text)
    if match is None:
        return None
    sign, whole, decimals, grouped, numerator, denominator, over, under = match.groups()
    if whole is not None:
        value = (
            int(whole) if decimals is None else Fraction(int(whole + decimals), 10 ** len(decimals))
        )
    elif grouped is not None:
        value = int(grouped.replace(",", ""))
    else:
        below = int(denominator or under)
        if below == 0:
            return None
        value = Fraction(int(numerator or over), below)
    return -value if sign else value


def number(text: str) -> Number:
    """A literal of the lexer. The repeating part of a decimal is in parentheses."""
    if text.isdecimal():
        return Number(Fraction(int(text)), digits=text)
    mantissa, _, exponent = text.lower().partition("e")
    whole, _, decimals = mantissa.partition(".")
    decimals, _, repeating = decimals.rstrip(")").partition("(")
    value = Fraction(int(whole + decimals or "0"), 10 ** len(decimals))
    if repeating:
        value += Fraction(int(repeating), (10 ** len(repeating) - 1) * 10 ** len(decimals))
    if exponent:
        if abs(int(exponent)) > MAX_EXPONENT:
            raise TooLarge(f"{text[:40]} has an exponent beyond {MAX_EXPONENT}")
        value *= Fraction(10) ** int(exponent)
    return Number(value, decimals=len(decimals))


def based_number(text: str) -> Number:
    """1011_2, 1011_{2}, 1011_{\\text{two}}: digits with their base."""
    digits, _, spelled = text.partition("_")
    spelled = spelled.replace("\\text", "").strip("{}")
    base = int(spelled) if spelled.isdecimal() else NUMBER_WORDS.get(spelled, 0)
    if not 2 <= base <= 16:
        raise Malformed(f"{spelled!r} is no base between 2 and 16")
    if any(int(digit, 16) >= base for digit in digits):
        raise Malformed(f"{digits} has digits that base {base} does not have")
    return Number(Fraction(int(digits, base)), digits=digits, base=base)
