"""Exact numbers and intervals: what they enclose, and what they refuse."""

import random
from fractions import Fraction

import pytest

from verl.utils.reward_score.math_grader.evaluate import Evaluator
from verl.utils.reward_score.math_grader.lexer import tokenize
from verl.utils.reward_score.math_grader.nodes import Number, TooLarge, Undecided, Undefined, Work
from verl.utils.reward_score.math_grader.numbers import exact_number
from verl.utils.reward_score.math_grader.parser import parse
from verl.utils.reward_score.math_grader.reals import Interval, RealArithmetic


def value(text, digits=40):
    return Evaluator({}, digits, Work()).value(parse(tokenize(text, commas_group_digits=True)))


# Fifty digits, from published tables.
KNOWN = {
    r"\pi": "3.14159265358979323846264338327950288419716939937510",
    r"e^1": "2.71828182845904523536028747135266249775724709369995",
    r"\sqrt{2}": "1.41421356237309504880168872420969807856967187537694",
    r"\ln 2": "0.69314718055994530941723212145817656807550013436025",
    r"\sin 1": "0.84147098480789650665250232163029899962256306079837",
    r"\cos 1": "0.54030230586813971740093660744297660373231042061792",
    r"\arctan 2": "1.10714871779409050301706546017853704007004764540143",
    r"\frac{1+\sqrt5}{2}": "1.61803398874989484820458683436563811772030917980576",
    r"2^{1/3}": "1.25992104989487316476721060727822835057025146470150",
    r"\log_{10} 2": "0.30102999566398119521373889472449302676818988146210",
    r"\sinh 1": "1.17520119364380145688238185059560081515571798133409",
    r"\tan 1": "1.55740772465490223050697480745836017308725077238152",
    r"\arcsin 0.5": "0.52359877559829887307710723054658381403286156656251",
}


@pytest.mark.parametrize("text", KNOWN)
@pytest.mark.parametrize("digits", [10, 20, 40])
def test_an_interval_holds_the_true_value_and_little_else(text, digits):
    enclosed = value(text, digits)
    assert isinstance(enclosed, Interval)
    low, high = map(Fraction, enclosed)
    truth, step = Fraction(KNOWN[text]), Fraction(1, 10**49)
    assert low <= truth + step
    assert truth - step <= high
    assert high - low < Fraction(1, 10 ** (digits - 3))


def test_intervals_hold_what_exact_arithmetic_gives():
    choose = random.Random(0)
    reals = RealArithmetic(8, Work(10**6))
    for _ in range(300):
        a, b = (Fraction(choose.randint(-999, 999), choose.randint(1, 999)) for _ in range(2))
        x, y = reals.interval(a), reals.interval(b)
        for exact, enclosed in [
            (a + b, reals.add(x, y)),
            (a - b, reals.subtract(x, y)),
            (a * b, reals.multiply(x, y)),
            (a * b, reals.multiply(x, b)),
            (a**7, reals.integer_power(x, 7)),
            (a / b if b else a, reals.divide(x, y) if b else x),
        ]:
            low, high = reals.interval(enclosed)
            assert Fraction(low) <= exact <= Fraction(high)
            assert Fraction(high) - Fraction(low) <= Fraction(max(1, abs(int(exact)) + 1), 10**5)


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        ("0.1+0.2", Fraction(3, 10)),
        ("1/3+1/6", Fraction(1, 2)),
        (r"\sqrt{\frac{4}{9}}", Fraction(2, 3)),
        (r"\sqrt[3]{-27}", Fraction(-3)),
        ("8^{-2/3}", Fraction(1, 4)),
        ("2^{-3}", Fraction(1, 8)),
        ("10!/8!", Fraction(90)),
        (r"0.1\overline{6}", Fraction(1, 6)),
        ("12.5e-1", Fraction(5, 4)),
        ("777_8", Fraction(511)),
        (r"\lfloor -\frac{7}{2}\rfloor", Fraction(-4)),
        (r"\lceil e \rceil", Fraction(3)),
        (r"\sin 0", Fraction(0)),
        (r"\ln 1", Fraction(0)),
    ],
)
def test_what_is_rational_stays_exact(text, exact):
    assert value(text) == exact


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("1/0", Undefined),
        ("0^0", Undefined),
        ("0^{-1}", Undefined),
        (r"\ln 0", Undefined),
        (r"\arcsin 2", Undefined),
        (r"\sqrt[0]{2}", Undefined),
        ("0.5!", Undefined),
        (r"1/\sin\pi", Undecided),
        (r"\ln(\sin\pi)", Undecided),
        ("(10^9)!", TooLarge),
        (r"e^{10^{13}}", TooLarge),
        (r"\sin(10^{13})", TooLarge),
    ],
)
def test_what_has_no_value_or_too_large_a_one_is_refused(text, error):
    with pytest.raises(error):
        value(text)


def test_the_fast_reading_of_plain_numbers_agrees_with_the_parser():
    choose = random.Random(1)
    texts = ["0", "-0", "007", "1,234", "12,345,678", "1/3", "-1/3", "3/0", r"\frac{3}{0}", "1,23"]
    for _ in range(300):
        over, under = choose.randint(0, 10**6), choose.randint(1, 10**4)
        sign = choose.choice(["", "-", "- "])
        texts += [
            f"{sign}{over}", f"{sign}{over}.{under}", f" {sign}{over}/{under} ", f"{sign}{over:,}",
            f"{sign}\\frac{{{over}}}{{{under}}}", f"{sign}\\dfrac{{{over}}}{{{under}}}",
        ]  # fmt: skip
    for text in texts:
        fast = exact_number(text)
        if fast is None:
            assert text in ("3/0", r"\frac{3}{0}", "1,23")
        else:
            assert value(text) == fast, text


def test_a_literal_keeps_its_digits():
    assert parse(tokenize("1.50", commas_group_digits=True)) == Number(Fraction(3, 2), decimals=2)
