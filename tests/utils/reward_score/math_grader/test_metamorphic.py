"""Rewriting an answer must not change its verdict; changing its value must."""

import random

from tests.utils.reward_score.math_grader import generator
from verl.utils.reward_score.math_grader import Correct, Wrong, grade

SEEDS = range(100)
"""More only take more time."""


def assert_same(answer: str, gold: str) -> None:
    assert grade(answer, gold) == Correct(), f"{answer!r} should equal {gold!r}"


def assert_different(answer: str, gold: str) -> None:
    verdict = grade(answer, gold)
    assert isinstance(verdict, Wrong), f"{answer!r} against {gold!r}: {verdict}"


def test_a_rational_number_equals_its_other_spellings_and_no_neighbour():
    for choose in map(random.Random, SEEDS):
        value = generator.rational(choose)
        gold = generator.plain(value)
        for _ in range(4):
            assert_same(generator.decorated(generator.spelled(value, choose), choose), gold)
            assert_same(generator.spelled(value, choose), generator.spelled(value, choose))
        for miss in (value + 1, -value if value else value + 2, value / 10 if value else value + 3,
                     value + generator.Fraction(1, 10**6)):  # fmt: skip
            assert_different(
                generator.spelled(miss, choose) if miss.denominator < 200 else str(miss), gold
            )


def test_a_sum_with_a_root_equals_its_other_spellings_and_no_neighbour():
    for choose in map(random.Random, SEEDS):
        factor, radicand, write = generator.surd(choose)
        offset = generator.rational(choose)
        gold = f"{generator.plain(offset)}+{write(choose)}"
        text = generator.plain(offset)
        assert_same(f"{write(choose)}+({text})", gold)
        assert_same(generator.decorated(f"({text})+{write(choose)}", choose), gold)
        assert_same(f"-({generator.plain(-offset)}-{write(choose)})", gold)
        assert_different(f"{text}-{write(choose)}", gold)
        assert_different(f"({generator.plain(offset + 1)})+{write(choose)}", gold)
        assert_different(f"{text}+{factor}\\sqrt{{{radicand + 1}}}", gold)
        assert_different(f"{text}+{float(factor) * radicand**0.5:.12f}", gold)


def test_a_polynomial_equals_its_reorderings_and_multiples_and_no_neighbour():
    for choose in map(random.Random, SEEDS):
        terms = generator.polynomial(choose)
        gold = generator.written(terms, choose)
        assert_same(generator.written(terms, choose), gold)
        assert_same(f"2({generator.written(terms, choose)})/2", gold)
        assert_same(f"({generator.written(terms, choose)})(x+1) - x({gold}) ", f"{gold}")
        assert_same(f"3({generator.written(terms, choose)}) = 0", f"{gold} = 0")
        exponents = choose.choice(sorted(terms))
        assert_different(
            generator.written({**terms, exponents: terms[exponents] + 10}, choose), gold
        )
        assert_different(generator.written({**terms, (5, 0): 1}, choose), gold)
        assert_different(f"{gold}+0.000001", gold)


def test_sets_do_not_care_for_order_and_points_do():
    for choose in map(random.Random, SEEDS):
        values = list({generator.rational(choose) for _ in range(choose.randint(2, 5))})
        while len(values) < 2:
            values.append(values[-1] + 1)
        gold = generator.shuffled_set(values, choose)
        assert_same(generator.shuffled_set(values, choose), gold)
        assert_different(generator.shuffled_set([*values[1:], values[0] + 100], choose), gold)
        assert_different(generator.shuffled_set([*values, sum(values) + 1000], choose), gold)
        point = "(" + ",".join(generator.plain(value) for value in values) + ")"
        assert_same("\\left( " + ", ".join(map(str, values)) + " \\right)", point)
        assert_different(
            "(" + ",".join(generator.plain(value) for value in values[::-1]) + ")", point
        )
        assert_different("[" + point[1:-1] + "]", point)
