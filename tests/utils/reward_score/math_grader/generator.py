"""Random answers with texts that mean the same and texts that nearly do, for any number of seeds.

An expression is built together with its exact value, so that a near miss is known to be one: its
value differs. The rewrites change the spelling only.
"""

import random
from collections.abc import Callable
from fractions import Fraction

Rewrite = Callable[[str, random.Random], str]


def rational(choose: random.Random) -> Fraction:
    return Fraction(choose.randint(-60, 60), choose.choice([1, 1, 1, 2, 3, 4, 5, 7, 8, 12, 25]))


def spelled(value: Fraction, choose: random.Random) -> str:
    """One of the ways to write a rational number."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    over, under = size.numerator, size.denominator
    factor = choose.randint(2, 9)
    ways = [
        f"{sign}\\frac{{{over}}}{{{under}}}",
        f"{sign}\\dfrac{{{over * factor}}}{{{under * factor}}}",
        f"{sign}{over}/{under}",
        f"{sign}\\left(\\frac{{{over}}}{{{under}}}\\right)",
        f"{sign}{over}\\cdot{under}^{{-1}}",
        f"{sign}\\frac{{{over}}}{{{under}}}\\text{{ cm}}",
        f"{value + factor}-{factor}",
    ]
    if under == 1:
        ways += [
            f"{sign}{over}",
            f"{sign}{over}.0",
            f"{sign}{over:,}",
            f"{sign}{over}\\%\\cdot 100",
        ]
    if under in (2, 4, 5, 8, 25):
        ways += [f"{sign}{over * (1000 // under) / 1000:.3f}", f"{sign}{over * 1000 // under}e-3"]
    if over > under > 1:
        whole, rest = divmod(over, under)
        ways += [f"{sign}{whole}\\frac{{{rest}}}{{{under}}}", f"{sign}{whole} {rest}/{under}"]
    return choose.choice(ways)


def surd(choose: random.Random) -> tuple[Fraction, int, Callable[[random.Random], str]]:
    """a sqrt(n), with n free of squares: (a, n, how to write it)."""
    factor, radicand = choose.randint(1, 9), choose.choice([2, 3, 5, 6, 7, 10])

    def write(choose: random.Random) -> str:
        return choose.choice(
            [
                f"{factor}\\sqrt{{{radicand}}}",
                f"\\sqrt{{{factor * factor * radicand}}}",
                f"{factor}\\cdot {radicand}^{{1/2}}",
                f"\\frac{{{factor * radicand}}}{{\\sqrt{{{radicand}}}}}",
                f"\\sqrt{{{radicand}}} * {factor}",
            ]
        )

    return Fraction(factor), radicand, write


def polynomial(choose: random.Random) -> dict[tuple[int, int], int]:
    """Coefficients by the exponents of x and y."""
    exponents = choose.sample([(i, j) for i in range(4) for j in range(3)], choose.randint(2, 4))
    return {pair: choose.choice([-5, -3, -2, -1, 1, 2, 3, 4, 7]) for pair in exponents}


def written(terms: dict[tuple[int, int], int], choose: random.Random) -> str:
    """A polynomial with its terms and factors in any order."""
    texts = []
    for (x, y), coefficient in choose.sample(sorted(terms.items()), len(terms)):
        factors = [str(abs(coefficient))]
        factors += [choose.choice([f"x^{x}", f"x^{{{x}}}"])] * bool(x)
        factors += [choose.choice([f"y^{y}", f"y^{{{y}}}"])] * bool(y)
        joined = choose.choice([" ", "\\cdot ", "*"]).join(factors)
        texts.append(("-" if coefficient < 0 else "+") + joined)
    return choose.choice(["", " "]).join(texts).removeprefix("+")


def decorated(text: str, choose: random.Random) -> str:
    """The same answer between dollars, in a box, with spaces, or with a name in front."""
    return choose.choice(
        [
            text,
            f"${text}$",
            f" {text} ",
            f"\\boxed{{{text}}}",
            f"\\displaystyle {text}",
            f"\\left({text}\\right)",
            f"{{{text}}}",
            f"z = {text}",
            f"{text}.",
            f"\\,{text}\\,",
        ]
    )


def shuffled_set(values: list[Fraction], choose: random.Random) -> str:
    texts = [plain(value) for value in choose.sample(values, len(values))]
    opening, closing = choose.choice([("\\{", "\\}"), ("\\left\\{", "\\right\\}"), ("{", "}")])
    return opening + choose.choice([",", ", "]).join(texts) + closing


def plain(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value)
    return f"{'-' * (value < 0)}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
