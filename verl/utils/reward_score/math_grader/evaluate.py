"""The value of an expression, given values for its symbols.

A value is a real number, or a `Complex` where the imaginary unit or the root of a negative number
occurs. Points of symbols are real, and there even roots of negative numbers have no value: what is
asked for is where two formulas agree as real functions.

Pi and the circular functions are computed on intervals, at the middle by power series with ten
digits to spare. None changes faster than its argument, so half the interval's width is added to the
error on both sides.
"""

import math
from collections.abc import Callable, Mapping
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal, InvalidOperation, Overflow
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from verl.utils.reward_score.math_grader.nodes import (
    Call,
    Constant,
    Degree,
    Inverse,
    Negate,
    Node,
    Number,
    Percent,
    Power,
    Product,
    Sum,
    Symbol,
    TooLarge,
    Undecided,
    Undefined,
    Unsupported,
    Work,
)
from verl.utils.reward_score.math_grader.reals import ONE, ZERO, Interval, Real, RealArithmetic


class Complex(NamedTuple):
    real: Real
    imaginary: Real


Value = Real | Complex
MAX_FACTORIAL = 800
MAX_COMPLEX_EXPONENT = 64
MAX_ROOT_INDEX = 64
MAX_FLOOR_DIGITS = 200
SPARE_DIGITS = 10
MAX_ANGLE = 10**12


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


class Evaluator:
    """Values at one point, to one precision. `log_base` is what \\log without an index means."""

    def __init__(
        self, point: Mapping[str, Fraction], digits: int, work: Work, log_base: int | None = 10
    ) -> None:
        self.reals = RealArithmetic(digits, work)
        self._point = point
        self._log_base = log_base

    def value(self, node: Node) -> Value:
        try:
            return self._value(node)
        except Overflow as error:
            raise TooLarge("a number with too many digits") from error
        except InvalidOperation as error:
            raise Undefined("an operation without a result") from error

    def subtract(self, a: Value, b: Value) -> Complex:
        (a_real, a_imaginary), (b_real, b_imaginary) = _parts(a), _parts(b)
        return Complex(
            self.reals.subtract(a_real, b_real), self.reals.subtract(a_imaginary, b_imaginary)
        )

    def is_close_to_zero(self, difference: Complex, of: Value) -> bool:
        """Whether the interval is so small, beside the number, that zero inside means agreement."""
        scale = max(self.reals.size(part) for part in _parts(of))
        return all(self.reals.is_narrow(part, scale) for part in difference)

    def divide(self, a: Value, b: Value) -> Value:
        return self._multiply(a, self._invert(b))

    def _value(self, node: Node) -> Value:
        match node:
            case Number(value=number):
                return number
            case Symbol(name=name):
                return self._point[name]
            case Constant(name=name):
                return self._constant(name)
            case Sum(terms=terms):
                return self._sum(terms)
            case Product(factors=factors):
                return self._product(factors)
            case Negate(operand=operand):
                return self._multiply(Fraction(-1), self._value(operand))
            case Inverse(operand=operand):
                return self._invert(self._value(operand))
            case Percent(operand=operand):
                return self._multiply(Fraction(1, 100), self._value(operand))
            case Degree(operand=operand):
                radian = self.reals.multiply(Fraction(1, 180), pi(self.reals))
                return self._multiply(radian, self._value(operand))
            case Power(base=base, exponent=exponent):
                return self._power(base, exponent)
            case Call(function=function, arguments=arguments):
                return self._call(function, arguments)
            case _:
                raise Unsupported(f"a {type(node).__name__.lower()} inside an expression")

    # ---- arithmetic

    def _constant(self, name: str) -> Value:
        if name == "i":
            return Complex(ZERO, ONE)
        if name == "pi":
            return pi(self.reals)
        if name == "e":
            return self.reals.exp(ONE)
        raise Unsupported("infinity inside an expression")

    def _sum(self, terms: tuple[Node, ...]) -> Value:
        total: Value = ZERO
        for term in terms:
            value = self._value(term)
            if not isinstance(total, Complex) and not isinstance(value, Complex):
                total = self.reals.add(total, value)
            else:
                (a, b), (c, d) = _parts(total), _parts(value)
                total = _simplified(self.reals.add(a, c), self.reals.add(b, d))
        return total

    def _product(self, factors: tuple[Node, ...]) -> Value:
        total: Value = ONE
        for factor in factors:
            total = self._multiply(total, self._value(factor))
        return total

    def _multiply(self, x: Value, y: Value) -> Value:
        if not isinstance(x, Complex) and not isinstance(y, Complex):
            return self.reals.multiply(x, y)
        (a, b), (c, d) = _parts(x), _parts(y)
        times = self.reals.multiply
        return _simplified(
            self.reals.subtract(times(a, c), times(b, d)), self.reals.add(times(a, d), times(b, c))
        )

    def _invert(self, x: Value) -> Value:
        if not isinstance(x, Complex):
            return self.reals.invert(x)
        a, b = x
        size = self.reals.add(self.reals.multiply(a, a), self.reals.multiply(b, b))
        scale = self.reals.invert(size)
        return _simplified(
            self.reals.multiply(a, scale), self.reals.negate(self.reals.multiply(b, scale))
        )

    # ---- powers

    def _power(self, base_node: Node, exponent_node: Node) -> Value:
        exponent = self._value(exponent_node)
        if base_node == Constant("e"):
            return self._exp(exponent)
        base = self._value(base_node)
        if isinstance(exponent, Fraction) and exponent.denominator == 1:
            return self._integer_power(base, int(exponent))
        if isinstance(base, Complex) or isinstance(exponent, Complex):
            raise Unsupported("a complex number in a power")
        if isinstance(exponent, Fraction) and exponent.denominator <= MAX_ROOT_INDEX:
            root = self._root(base, exponent.denominator)
            return self._integer_power(root, exponent.numerator)
        if base == ZERO:
            raise Undefined("a power of zero")
        return self.reals.exp(self.reals.multiply(exponent, self.reals.ln(base)))

    def _integer_power(self, base: Value, exponent: int) -> Value:
        if not isinstance(base, Complex):
            if base == ZERO and exponent <= 0:
                raise Undefined("zero to a power that is not positive")
            return self.reals.integer_power(base, exponent)
        if abs(exponent) > MAX_COMPLEX_EXPONENT:
            raise TooLarge("a high power of a complex number")
        power: Value = ONE
        for _ in range(abs(exponent)):
            power = self._multiply(power, base)
        return self._invert(power) if exponent < 0 else power

    def _exp(self, exponent: Value) -> Value:
        """e^(a + ib) = e^a (cos b + i sin b)."""
        if not isinstance(exponent, Complex):
            return self.reals.exp(exponent)
        size = self.reals.exp(exponent.real)
        sine, cosine = sine_and_cosine(exponent.imaginary, self.reals)
        return _simplified(self.reals.multiply(size, cosine), self.reals.multiply(size, sine))

    def _root(self, a: Real, index: int) -> Value:
        if index % 2 == 0 and not self._point and self.reals.sign(a) < 0:
            if index != 2:
                raise Unsupported("a complex root of higher order")
            return Complex(ZERO, self.reals.root(self.reals.negate(a), 2))
        return self.reals.root(a, index)

    # ---- functions

    def _call(self, function: str, nodes: tuple[Node, ...]) -> Value:
        arguments = [self._value(node) for node in nodes]
        if function == "abs" and isinstance(arguments[0], Complex):
            a, b = arguments[0]
            size = self.reals.add(self.reals.multiply(a, a), self.reals.multiply(b, b))
            return self.reals.root(size, 2)
        if function == "exp":
            return self._exp(arguments[0])
        reals = [argument for argument in arguments if not isinstance(argument, Complex)]
        if len(reals) < len(arguments):
            raise Unsupported(f"{function} of a complex number")
        if function == "root":
            return self._root(reals[1], _whole(reals[0], "the index of a root", 1))
        if function == "log":
            return self._log(*reals)
        return FUNCTIONS[function](self.reals, *reals)

    def _log(self, first: Real, second: Real | None = None) -> Real:
        base, argument = (None, first) if second is None else (first, second)
        if base is None and self._log_base is not None:
            base = Fraction(self._log_base)
        if base is None:
            return self.reals.ln(argument)
        return self.reals.divide(self.reals.ln(argument), self.reals.ln(base))


def _parts(value: Value) -> Complex:
    return value if isinstance(value, Complex) else Complex(value, ZERO)


def _simplified(real: Real, imaginary: Real) -> Value:
    return real if imaginary == ZERO else Complex(real, imaginary)


def _whole(a: Real, what: str, least: int = 0) -> int:
    if not isinstance(a, Fraction) or a.denominator != 1 or a < least:
        raise Undefined(f"{what} that is not a whole number")
    return int(a)


def _sine(reals: RealArithmetic, a: Real) -> Real:
    return sine_and_cosine(a, reals)[0]


def _cosine(reals: RealArithmetic, a: Real) -> Real:
    return sine_and_cosine(a, reals)[1]


def _tangent(reals: RealArithmetic, a: Real) -> Real:
    sine, cosine = sine_and_cosine(a, reals)
    return reals.divide(sine, cosine)


def _cotangent(reals: RealArithmetic, a: Real) -> Real:
    sine, cosine = sine_and_cosine(a, reals)
    return reals.divide(cosine, sine)


def _arccosine(reals: RealArithmetic, a: Real) -> Real:
    quarter = reals.multiply(Fraction(1, 2), pi(reals))
    return reals.subtract(quarter, arcsine(a, reals))


def _hyperbolic(reals: RealArithmetic, a: Real, sign: int) -> Real:
    """(e^a + sign e^-a) / 2."""
    grows, decays = reals.exp(a), reals.exp(reals.negate(a))
    both = reals.add(grows, reals.multiply(Fraction(sign), decays))
    return reals.multiply(Fraction(1, 2), both)


def _floor(reals: RealArithmetic, a: Real) -> Real:
    if isinstance(a, Fraction):
        return Fraction(math.floor(a))
    low, high = (end.to_integral_value(ROUND_FLOOR) for end in a)
    if low != high:
        raise Undecided("the whole part of a number close to a whole one")
    if low.adjusted() > MAX_FLOOR_DIGITS:
        raise TooLarge("the whole part of a large number")
    return Fraction(int(low))


def _ceil(reals: RealArithmetic, a: Real) -> Real:
    return reals.negate(_floor(reals, reals.negate(a)))


def _factorial(reals: RealArithmetic, a: Real) -> Real:
    n = _whole(a, "the factorial of a number")
    if n > MAX_FACTORIAL:
        raise TooLarge(f"the factorial of a number beyond {MAX_FACTORIAL}")
    reals.work.spend(1 + n // 10)
    return Fraction(math.factorial(n))


def _binomial(reals: RealArithmetic, a: Real, b: Real) -> Real:
    n, k = _whole(a, "a binomial coefficient"), _whole(b, "a binomial coefficient")
    if n > 2 * MAX_FACTORIAL:
        raise TooLarge("a binomial coefficient of large numbers")
    reals.work.spend(1 + min(k, n) // 10)
    return Fraction(math.comb(n, k))


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


FUNCTIONS: dict[str, Callable[..., Real]] = {
    "sin": _sine,
    "cos": _cosine,
    "tan": _tangent,
    "cot": _cotangent,
    "sec": lambda reals, a: reals.invert(_cosine(reals, a)),
    "csc": lambda reals, a: reals.invert(_sine(reals, a)),
    "arcsin": lambda reals, a: arcsine(a, reals),
    "arccos": _arccosine,
    "arctan": lambda reals, a: arctangent(a, reals),
    "sinh": lambda reals, a: _hyperbolic(reals, a, -1),
    "cosh": lambda reals, a: _hyperbolic(reals, a, 1),
    "tanh": lambda reals, a: reals.divide(_hyperbolic(reals, a, -1), _hyperbolic(reals, a, 1)),
    "ln": lambda reals, a: reals.ln(a),
    "abs": lambda reals, a: reals.absolute(a),
    "floor": _floor,
    "ceil": _ceil,
    "factorial": _factorial,
    "binomial": _binomial,
}
