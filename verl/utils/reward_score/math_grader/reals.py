"""Real numbers that are exact while they can be, and enclosed by two decimals where they cannot.

A `Fraction` is exact. An `Interval` holds the true value for certain: every operation rounds its
lower end down and its upper end up, so whatever is read off its ends (a sign, a difference) is
proven, not rounded. More digits make the intervals narrower, never wrong.

The decimal module's operators round to the thread's own context, so only methods of the contexts
made here are used.
"""

import math
from collections.abc import Callable
from decimal import (
    ROUND_CEILING,
    ROUND_FLOOR,
    Context,
    Decimal,
    DivisionByZero,
    InvalidOperation,
    Overflow,
)
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from verl.utils.reward_score.math_grader.nodes import (
    MAX_BITS,
    TooLarge,
    Undecided,
    Undefined,
    Work,
)

MAX_EXPONENT = 10**12
"""Largest power of ten that is computed with."""

MAX_ROOT_BITS = 1024
"""Exact roots are looked for in numbers up to this size."""


class Interval(NamedTuple):
    low: Decimal
    high: Decimal


Real = Fraction | Interval
ZERO, ONE = Fraction(0), Fraction(1)


class RealArithmetic:
    """The four operations, comparison and the monotonic functions, to `digits` decimal digits."""

    def __init__(self, digits: int, work: Work) -> None:
        self.digits = digits
        self.work = work
        self._function_cost = 5 * (1 + digits // 40) ** 2

    @cached_property
    def _down(self) -> Context:
        return _context(self.digits, ROUND_FLOOR)

    @cached_property
    def _up(self) -> Context:
        return _context(self.digits, ROUND_CEILING)

    # ---- operations

    def add(self, a: Real, b: Real) -> Real:
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            self._spend_on(a, b)
            return self._settle(a + b)
        self.work.spend(1)
        (a_low, a_high), (b_low, b_high) = self.interval(a), self.interval(b)
        return Interval(self._down.add(a_low, b_low), self._up.add(a_high, b_high))

    def negate(self, a: Real) -> Real:
        if isinstance(a, Fraction):
            return -a
        return Interval(a.high.copy_negate(), a.low.copy_negate())

    def subtract(self, a: Real, b: Real) -> Real:
        return self.add(a, self.negate(b))

    def multiply(self, a: Real, b: Real) -> Real:
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            self._spend_on(a, b)
            return self._settle(a * b)
        self.work.spend(1)
        if ZERO in (a, b):
            return ZERO
        pairs = [(x, y) for x in self.interval(a) for y in self.interval(b)]
        return Interval(
            min(self._down.multiply(x, y) for x, y in pairs),
            max(self._up.multiply(x, y) for x, y in pairs),
        )

    def invert(self, a: Real) -> Real:
        self.work.spend(1)
        sign = self.sign(a)
        if sign == 0:
            raise Undefined("a division by zero")
        if isinstance(a, Fraction):
            return 1 / a
        one = Decimal(1)
        return Interval(self._down.divide(one, a.high), self._up.divide(one, a.low))

    def divide(self, a: Real, b: Real) -> Real:
        return self.multiply(a, self.invert(b))

    def integer_power(self, a: Real, exponent: int) -> Real:
        """`a` to a whole number: exact while it is small, else through the logarithm."""
        if exponent == 0:
            return ONE
        if exponent < 0:
            return self.invert(self.integer_power(a, -exponent))
        if a in (ZERO, ONE):
            return a
        if isinstance(a, Fraction) and _num_bits(a) * exponent <= MAX_BITS:
            self.work.spend(1 + exponent.bit_length())
            return a**exponent
        if exponent <= 8:
            return self.multiply(a, self.integer_power(a, exponent - 1))
        magnitude = self.exp(self.multiply(Fraction(exponent), self.ln(self.absolute(a))))
        return self.negate(magnitude) if exponent % 2 and self.sign(a) < 0 else magnitude

    def absolute(self, a: Real) -> Real:
        return self.negate(a) if self.sign(a) < 0 else a

    # ---- functions that only grow

    def exp(self, a: Real) -> Real:
        if a == ZERO:
            return ONE
        self._limit(a, 10**12)
        return self._monotonic(a, self._down.exp)

    def ln(self, a: Real) -> Real:
        if self.sign(a) <= 0:
            raise Undefined("the logarithm of a number that is not positive")
        return ZERO if a == ONE else self._monotonic(a, self._down.ln)

    def root(self, a: Real, index: int) -> Real:
        """The real root: exact where there is one, negative for odd roots of negative numbers."""
        sign = self.sign(a)
        if sign == 0:
            return ZERO
        if sign < 0:
            if index % 2 == 0:
                raise Undefined("an even root of a negative number")
            return self.negate(self.root(self.negate(a), index))
        exact = _exact_root(a, index) if isinstance(a, Fraction) else None
        if exact is not None:
            self.work.spend(5)
            return exact
        if index == 2:
            return self._monotonic(a, self._down.sqrt)
        return self.exp(self.multiply(Fraction(1, index), self.ln(a)))

    def _monotonic(self, a: Real, function: Callable[[Decimal], Decimal]) -> Interval:
        """The decimal module rounds these to the nearest number: one step outwards is safe."""
        self.work.spend(self._function_cost)
        low, high = self.interval(a)
        return Interval(self._down.next_minus(function(low)), self._up.next_plus(function(high)))

    # ---- comparison

    def sign(self, a: Real) -> int:
        """-1, 0 or 1; 0 only if it is exactly zero."""
        if isinstance(a, Fraction):
            return (a > 0) - (a < 0)
        if a.low > 0 or a.high < 0:
            return 1 if a.low > 0 else -1
        raise Undecided("the sign of a number close to zero")

    def is_zero(self, a: Real) -> bool:
        """False is proven; True may mean that all digits computed so far are zeros."""
        if isinstance(a, Fraction):
            return a == 0
        return a.low <= 0 <= a.high

    def size(self, a: Real) -> Decimal:
        """An upper bound of the absolute value."""
        return max(end.copy_abs() for end in self.interval(a))

    def is_narrow(self, a: Real, scale: Decimal) -> bool:
        """Whether the value is known to half the digits of a number of size `scale` (or of 1)."""
        low, high = self.interval(a)
        allowed = self._down.scaleb(max(scale, Decimal(1)), Decimal(-(self.digits // 2)))
        return self._up.subtract(high, low) <= allowed

    def interval(self, a: Real) -> Interval:
        if isinstance(a, Interval):
            return a
        self.work.spend(1 + _num_bits(a) // 1000)
        over, under = Decimal(a.numerator), Decimal(a.denominator)
        return Interval(self._down.divide(over, under), self._up.divide(over, under))

    def around(self, center: Decimal, radius: Decimal) -> Interval:
        return Interval(self._down.subtract(center, radius), self._up.add(center, radius))

    def _spend_on(self, a: Fraction, b: Fraction) -> None:
        self.work.spend(1 + (_num_bits(a) + _num_bits(b)) // 500)

    def _settle(self, a: Fraction) -> Real:
        return a if _num_bits(a) <= MAX_BITS else self.interval(a)

    def _limit(self, a: Real, bound: int) -> None:
        if any(end.copy_abs() > bound for end in self.interval(a)):
            raise TooLarge(f"a number beyond {bound} in an exponent")


def _context(digits: int, rounding: str) -> Context:
    return Context(
        prec=digits,
        rounding=rounding,
        Emin=-MAX_EXPONENT,
        Emax=MAX_EXPONENT,
        traps=[InvalidOperation, DivisionByZero, Overflow],
    )


def _num_bits(a: Fraction) -> int:
    return a.numerator.bit_length() + a.denominator.bit_length()


def _exact_root(a: Fraction, index: int) -> Fraction | None:
    over = _integer_root(a.numerator, index)
    under = _integer_root(a.denominator, index)
    return None if over is None or under is None else Fraction(over, under)


def _integer_root(value: int, index: int) -> int | None:
    """The whole number whose power is `value` > 0, if there is one, by Newton's method."""
    if value.bit_length() <= index:
        return 1 if value == 1 else None
    if value.bit_length() > MAX_ROOT_BITS:
        return None
    if index == 2:
        root = math.isqrt(value)
        return root if root * root == value else None
    guess = 1 << -(-value.bit_length() // index)
    while True:
        better = ((index - 1) * guess + value // guess ** (index - 1)) // index
        if better >= guess:
            return guess if guess**index == value else None
        guess = better
