"""Pi and the circular functions on intervals, which the decimal module does not have.

Each is computed at the middle of the interval by its power series with ten digits to spare. None
changes faster than its argument, so half the interval's width is added to the error on both sides.
"""

from decimal import ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction
from functools import lru_cache

from verl.utils.reward_score.math_grader.limits import TooLarge, Undefined
from verl.utils.reward_score.math_grader.reals import ONE, Interval, Real, RealArithmetic

SPARE_DIGITS = 10
MAX_ANGLE = 10**12
_HALF = Fraction(1, 2)


def pi(reals: RealArithmetic) -> Interval:
    reals.work.spend(1)
    return reals.around(_pi(reals.digits + SPARE_DIGITS), _error(reals.digits))


def sine_and_cosine(angle: Real, reals: RealArithmetic) -> tuple[Real, Real]:
    """Both at once, for the quarter turn taken off the angle may exchange them."""
    if angle == 0:
        return Fraction(0), ONE
    middle, radius = _middle(angle, reals)
    if middle.copy_abs() > MAX_ANGLE:
        raise TooLarge(f"an angle beyond {MAX_ANGLE}")
    wide = _working_context(reals.digits + 3 * SPARE_DIGITS)
    quarter = wide.divide(_pi(reals.digits + 3 * SPARE_DIGITS), Decimal(2))
    turns = int(wide.divide(middle, quarter).to_integral_value(ROUND_HALF_EVEN))
    rest = wide.subtract(middle, wide.multiply(Decimal(turns), quarter))
    context = _working_context(reals.digits + SPARE_DIGITS)
    sine = _alternating_series(rest, 1, context)
    cosine = _alternating_series(rest, 0, context)
    for _ in range(turns % 4):
        sine, cosine = cosine, sine.copy_negate()
    return reals.around(sine, radius), reals.around(cosine, radius)


def arctangent(a: Real, reals: RealArithmetic) -> Real:
    if a == 0:
        return a
    middle, radius = _middle(a, reals)
    context = _working_context(reals.digits + SPARE_DIGITS)
    is_inverted = middle.copy_abs() > 1
    rest = context.divide(Decimal(1), middle) if is_inverted else middle
    for _ in range(4):  # the angle is halved until the series is short
        below = context.add(1, context.sqrt(context.add(1, context.multiply(rest, rest))))
        rest = context.divide(rest, below)
    angle = context.multiply(Decimal(16), _odd_series(rest, context))
    if is_inverted:
        quarter = context.divide(_pi(reals.digits + SPARE_DIGITS), Decimal(2))
        angle = context.subtract(quarter.copy_sign(middle), angle)
    return reals.around(angle, radius)


def arcsine(a: Real, reals: RealArithmetic) -> Real:
    if isinstance(a, Fraction) and abs(a) == 1:
        return reals.multiply(a * _HALF, pi(reals))
    rest = reals.subtract(ONE, reals.multiply(a, a))
    if reals.sign(rest) < 0:
        raise Undefined("the inverse sine of a number beyond 1")
    return arctangent(reals.divide(a, reals.root(rest, 2)), reals)


def _middle(a: Real, reals: RealArithmetic) -> tuple[Decimal, Decimal]:
    """The middle of the interval, and how far results may be from what is computed there."""
    reals.work.spend(4 + reals.digits // 8 + reals.digits**2 // 2000)
    low, high = reals.interval(a)
    context = _working_context(reals.digits + 2 * SPARE_DIGITS)
    middle = context.divide(context.add(low, high), Decimal(2))
    return middle, context.add(context.subtract(high, low), _error(reals.digits))


def _alternating_series(x: Decimal, first: int, context: Context) -> Decimal:
    """Sum of (-1)^k x^n / n! over n = first + 2 k: the sine from 1, the cosine from 0."""
    term = total = x if first else Decimal(1)
    negative_square = context.multiply(x, x).copy_negate()
    smallest = _error(context.prec)
    n = first
    while term.copy_abs() > smallest:
        term = context.divide(context.multiply(term, negative_square), Decimal((n + 1) * (n + 2)))
        total = context.add(total, term)
        n += 2
    return total


def _odd_series(x: Decimal, context: Context) -> Decimal:
    """Sum of (-1)^k x^n / n over odd n: the inverse tangent of a small number."""
    power = total = x
    negative_square = context.multiply(x, x).copy_negate()
    smallest = _error(context.prec)
    n = 1
    while power.copy_abs() > smallest:
        power = context.multiply(power, negative_square)
        n += 2
        total = context.add(total, context.divide(power, Decimal(n)))
    return total


def _error(digits: int) -> Decimal:
    return Decimal((0, (1,), -digits))


def _working_context(digits: int) -> Context:
    return Context(prec=digits, rounding=ROUND_HALF_EVEN, Emin=-(10**9), Emax=10**9)


@lru_cache(maxsize=32)
def _pi(digits: int) -> Decimal:
    """Machin's formula in whole numbers: pi/4 = 4 arctan(1/5) - arctan(1/239)."""
    unit = 10 ** (digits + 10)

    def arctan_inverse(x: int) -> int:
        power, total, n = unit // x, unit // x, 1
        while power:
            power //= -x * x
            n += 2
            total += power // n
        return total

    scaled = 4 * (4 * arctan_inverse(5) - arctan_inverse(239))
    return Decimal(scaled).scaleb(-(digits + 10), Context(prec=digits + 20))
