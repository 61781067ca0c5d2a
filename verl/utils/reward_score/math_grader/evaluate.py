"""The value of an expression, given values for its symbols.

A value is a real number, or a `Complex` where the imaginary unit or the root of a negative number
occurs. Points of symbols are real, and there even roots of negative numbers have no value: what is
asked for is where two formulas agree as real functions.
"""

import math
from collections.abc import Callable, Mapping
from decimal import ROUND_FLOOR, InvalidOperation, Overflow
from fractions import Fraction
from typing import NamedTuple

from verl.utils.reward_score.math_grader import circular
from verl.utils.reward_score.math_grader.limits import (
    TooLarge,
    Undecided,
    Undefined,
    Unsupported,
    Work,
)
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
)
from verl.utils.reward_score.math_grader.reals import ONE, ZERO, Real, RealArithmetic


class Complex(NamedTuple):
    real: Real
    imaginary: Real


Value = Real | Complex
MAX_FACTORIAL = 800
MAX_COMPLEX_EXPONENT = 64
MAX_ROOT_INDEX = 64
MAX_FLOOR_DIGITS = 200


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
                radian = self.reals.multiply(Fraction(1, 180), circular.pi(self.reals))
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
            return circular.pi(self.reals)
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
        sine, cosine = circular.sine_and_cosine(exponent.imaginary, self.reals)
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
    return circular.sine_and_cosine(a, reals)[0]


def _cosine(reals: RealArithmetic, a: Real) -> Real:
    return circular.sine_and_cosine(a, reals)[1]


def _tangent(reals: RealArithmetic, a: Real) -> Real:
    sine, cosine = circular.sine_and_cosine(a, reals)
    return reals.divide(sine, cosine)


def _cotangent(reals: RealArithmetic, a: Real) -> Real:
    sine, cosine = circular.sine_and_cosine(a, reals)
    return reals.divide(cosine, sine)


def _arccosine(reals: RealArithmetic, a: Real) -> Real:
    quarter = reals.multiply(Fraction(1, 2), circular.pi(reals))
    return reals.subtract(quarter, circular.arcsine(a, reals))


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


FUNCTIONS: dict[str, Callable[..., Real]] = {
    "sin": _sine,
    "cos": _cosine,
    "tan": _tangent,
    "cot": _cotangent,
    "sec": lambda reals, a: reals.invert(_cosine(reals, a)),
    "csc": lambda reals, a: reals.invert(_sine(reals, a)),
    "arcsin": lambda reals, a: circular.arcsine(a, reals),
    "arccos": _arccosine,
    "arctan": lambda reals, a: circular.arctangent(a, reals),
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
