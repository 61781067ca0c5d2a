"""Whether two expressions are the same number, or the same function of their symbols.

Both are evaluated at points: one if there are no symbols, else three chosen by a hash of the texts,
positive and negative, small and large. Where both values are exact the answer is certain. Otherwise
the difference is enclosed in an interval: if that excludes zero, the mismatch is proven; if not,
more digits are computed, and what agrees in all of them is called equal.
"""

import random
import zlib
from collections.abc import Iterator, Mapping
from fractions import Fraction

from verl.utils.reward_score.math_grader.evaluate import Complex, Evaluator, Value
from verl.utils.reward_score.math_grader.nodes import (
    Node,
    Number,
    TooLarge,
    Undecided,
    Undefined,
    Unsupported,
    Work,
    symbols,
)
from verl.utils.reward_score.math_grader.reals import ZERO

PRECISIONS = (30, 100)
"""Decimal digits, at the first point; the others are checked with the first entry only."""

NUM_POINTS = 3
TOO_FEW_POINTS = "the formulas have values at too few common points"
_REGIONS = ((1, 5), (0, 1), (-5, 0), (5, 30), (0, 1), (-1, 0), (1, 2), (0, 5))
_STEPS = 10007
_WHOLE_POINTS = 4

Point = Mapping[str, Fraction]


class Equality:
    """Compares expressions; `seed` chooses the points, `log_base` is the base of plain \\log."""

    def __init__(self, seed: str, work: Work, log_base: int | None) -> None:
        self._seed = zlib.crc32(seed.encode(errors="replace"))
        self.work = work
        self._log_base = log_base

    def holds(self, gold: Node, answer: Node) -> bool:
        if isinstance(gold, Number) and isinstance(answer, Number):
            return gold.value == answer.value
        names = sorted(symbols(gold) | symbols(answer))
        if not names:
            return self._agree_at({}, gold, answer, PRECISIONS)
        num_agreed = 0
        for point in self._points(names):
            precisions = PRECISIONS[:1] if num_agreed else PRECISIONS
            try:
                if not self._agree_at(point, gold, answer, precisions):
                    return False
            except Undefined:
                continue
            num_agreed += 1
            if num_agreed == NUM_POINTS:
                return True
        raise Unsupported(TOO_FEW_POINTS)

    def is_within(self, gold: Node, answer: Node, tolerance: Fraction) -> bool:
        evaluator = Evaluator({}, PRECISIONS[-1], self.work, self._log_base)
        real, imaginary = evaluator.subtract(evaluator.value(gold), evaluator.value(answer))
        reals = evaluator.reals
        room = reals.subtract(tolerance, reals.absolute(real))
        return imaginary == ZERO and reals.sign(room) >= 0

    def is_proportional(self, gold: Node, answer: Node, *, same_sign: bool) -> bool:
        """Whether one is a constant, other than zero, times the other (with `same_sign`, > 0)."""
        ratios: list[Value] = []
        for point in self._points(sorted(symbols(gold) | symbols(answer))):
            evaluator = Evaluator(point, PRECISIONS[-1], self.work, self._log_base)
            try:
                ratio = evaluator.divide(evaluator.value(answer), evaluator.value(gold))
            except Undefined:
                continue
            if ratio == ZERO or (ratios and _differ(evaluator, ratio, ratios[0])):
                return False
            if same_sign and (isinstance(ratio, Complex) or evaluator.reals.sign(ratio) < 0):
                return False
            ratios.append(ratio)
            if len(ratios) == NUM_POINTS:
                return True
        raise Unsupported(TOO_FEW_POINTS)

    def _points(self, names: list[str]) -> Iterator[Point]:
        """Fractions with a large prime denominator; then whole numbers, for factorials."""
        choose = random.Random(self._seed)
        for low, high in _REGIONS:
            yield {
                name: low + (high - low) * Fraction(choose.randrange(1, _STEPS), _STEPS)
                for name in names
            }
        for _ in range(_WHOLE_POINTS):
            yield {name: Fraction(choose.randrange(2, 12)) for name in names}

    def _agree_at(
        self, point: Point, gold: Node, answer: Node, precisions: tuple[int, ...]
    ) -> bool:
        is_narrow = False
        for digits in precisions:
            evaluator = Evaluator(point, digits, self.work, self._log_base)
            try:
                values = self._values(evaluator, gold, answer, is_constant=not point)
            except Undecided:
                continue
            if values is None:
                return False
            difference = evaluator.subtract(*values)
            if _excludes_zero(evaluator, difference):
                return False
            if all(isinstance(part, Fraction) for part in difference):
                return True
            is_narrow = evaluator.is_close_to_zero(difference, values[0])
        if not is_narrow:
            raise TooLarge("the numbers cannot be told apart with the digits allowed")
        return True

    def _values(
        self, evaluator: Evaluator, gold: Node, answer: Node, *, is_constant: bool
    ) -> tuple[Value, Value] | None:
        """Both values; None where only the answer, a constant, has none (as 1/0)."""
        try:
            expected = evaluator.value(gold)
        except Undefined as error:
            if is_constant:
                raise Unsupported(f"the gold answer has no value: {error}") from error
            raise
        try:
            return expected, evaluator.value(answer)
        except Undefined:
            if is_constant:
                return None
            raise


def _differ(evaluator: Evaluator, a: Value, b: Value) -> bool:
    return _excludes_zero(evaluator, evaluator.subtract(a, b))


def _excludes_zero(evaluator: Evaluator, difference: Complex) -> bool:
    return not all(evaluator.reals.is_zero(part) for part in difference)
