"""The grader on the corpus of graded pairs: how often it is wrong, and what it says."""

import pytest

from tests.utils.reward_score.math_grader.corpus import read, rows
from verl.utils.import_utils import is_available
from verl.utils.reward_score import math_verify
from verl.utils.reward_score.math_grader import Abstain, Correct, Wrong, grade

CORPUS = read()
MAX_MISSED = 0.02
MAX_FORGED = 0.002
needs_package = pytest.mark.skipif(
    not is_available("math_verify"), reason="math-verify is not installed"
)


def shares(judge, part_of_corpus) -> tuple[float, float]:
    """Right answers that are not called right, and wrong ones that are."""
    right, wrong = (
        [row for row in part_of_corpus if row["verdict"] == verdict]
        for verdict in ("right", "wrong")
    )
    missed = [row for row in right if judge(row["answer"], row["gold"]) != Correct()]
    forged = [row for row in wrong if judge(row["answer"], row["gold"]) == Correct()]
    return len(missed) / len(right), len(forged) / len(wrong)


@pytest.mark.parametrize("part", ["tuned", "held out"])
def test_few_right_answers_are_missed_and_no_more_than_two_in_a_thousand_wrong_ones_pass(part):
    missed, forged = shares(grade, [row for row in CORPUS if row["part"] == part])
    assert missed <= MAX_MISSED
    assert forged <= MAX_FORGED


def test_the_corpus_is_what_its_generators_write():
    assert list(rows()) == CORPUS
    assert len(CORPUS) >= 1000
    num_wrong = sum(row["verdict"] == "wrong" for row in CORPUS)
    num_held_out = sum(row["part"] == "held out" for row in CORPUS)
    assert 0.45 < num_wrong / len(CORPUS) < 0.55
    assert 0.35 < num_held_out / len(CORPUS) < 0.45


@needs_package
def test_math_verify_grades_what_the_grammar_lacks():
    calculus = [row for row in CORPUS if row["kind"] == "calculus and sums"]
    missed, forged = shares(math_verify.grade_or_ask, calculus)
    assert missed <= 0.1 < shares(grade, calculus)[0]
    assert forged == 0


@needs_package
@pytest.mark.slow
def test_the_grader_misses_and_forges_less_than_math_verify_alone():
    def library(answer: str, gold: str):
        return math_verify.second_opinion(f"\\boxed{{{answer}}}", gold)

    missed, forged = shares(library, CORPUS)
    assert shares(grade, CORPUS) < (missed, forged)
    assert shares(grade, CORPUS)[1] < forged
    math_verify.close_workers()


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("32349", "32, 349"), ("32,349", "32, 349"), ("1,234", "234, 1"), ("10", "10_2"),
        ("5", "3=5"), ("5", "x=5=6"), ("5", "5=6"), (r"\$5", r"5\%"), ("12", "1,2"), ("5", "5 5"),
        (r"5 \text{ m}", "5 s"), (r"\frac{3}{13} \approx 0.23", r"\frac{3}{14} \approx 0.23"),
        ("y'", "y"), ("y''", "y'"), (r"\sqrt{2}+4", "101_2"),
        ("3 < 5", "1 < 7"), ("(3,4)", "x=4, y=3"), ("x<1", r"x<1 \text{ or } x>2"),
    ],
)  # fmt: skip
def test_what_only_looks_like_the_gold_answer_is_wrong(gold, answer):
    assert isinstance(grade(answer, gold), Wrong)


@pytest.mark.parametrize(
    ("gold", "answer", "reason"),
    [
        ("5", "5+9^{9^9}-9^{9^9}", "cannot be told apart"),
        ("2", r"\log 100", "the base of a logarithm is not given, and matters"),
        (r"5\text{ apples}", r"5\text{ pears}", "'pear' is another name for 'apple'"),
        ("5", r"\int_0^5 dx", r"the command \\int is not known"),
        ("5", r"\begin{cases}5\end{cases}", r"the command \\begin is not known"),
        ("5", "5!!", "a double factorial"),
        ("5", "五", "has no meaning in an answer"),
        ("", "5", "there is no gold answer"),
        (r"\int x dx", "5", r"the gold answer cannot be read: the command \\int"),
        (r"\frac{1}{0}", "5", "the gold answer has no value: a division by zero"),
        ("5", "x" * 2001, "the text is too long"),
        ("5", "(" * 30 + "5" + ")" * 30, "nested more than 24 deep"),
    ],
)
def test_what_cannot_be_settled_is_an_abstention_with_its_reason(gold, answer, reason):
    verdict = grade(answer, gold)
    assert isinstance(verdict, Abstain)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(verdict.reason)


@pytest.mark.parametrize(
    ("gold", "answer", "reason"),
    [
        ("5", "6", "the numbers differ"),
        ("5", "(5", "not mathematics: 'the end' stands where ) or ] or [ should"),
        ("5", "", "there is no answer"),
        ("5", "5 +", "not mathematics: 'the end' is out of place"),
    ],
)
def test_a_wrong_answer_has_its_reason(gold, answer, reason):
    assert grade(answer, gold) == Wrong(reason)


def test_what_stands_before_its_rounded_value_is_the_answer():
    gold = r"x = \frac{1}{3} \approx 0.33"
    assert grade(r"\frac{1}{3}", gold) == Correct()
    assert isinstance(grade("x", gold), Wrong)


def test_a_chain_of_relations_is_compared_member_by_member():
    assert grade("c > 2b > a", "a < b+b < c") == Correct()
    assert isinstance(grade("a < b < c", "a < 2b < c"), Wrong)


@pytest.mark.parametrize("answer", ["(A) or (B)", "A) 5, B) 6", "(A), (B)", "(A)/(B)", "A. or B"])
def test_several_letters_are_no_choice_of_one(answer):
    assert grade(answer, "A") == Wrong("more than one choice")


@pytest.mark.parametrize("answer", ["B. A circle", "(B) A dog and a cat", "B: the AND gate"])
def test_a_choice_may_be_spelled_out(answer):
    assert grade(answer, "B") == Correct()


def test_letters_are_a_word_or_a_product_of_variables():
    assert isinstance(grade("plane", "panel"), Wrong)
    assert grade("BACDE", "ABCDE") == Correct()


def test_every_gold_answer_equals_itself_whatever_surrounds_it():
    for gold in sorted({row["gold"] for row in CORPUS if row["kind"] != "calculus and sums"}):
        for answer in (gold, f"$ {gold} $.", f"\\boxed{{{gold}}}", f"  {gold}\\ "):
            assert grade(answer, gold) == Correct(), f"{answer!r} should equal {gold!r}"


def test_a_comma_may_group_digits_or_separate_numbers_but_not_both_at_once():
    assert grade("1,234", "1234") == Correct()
    assert grade("234, 1", "1, 234") == Correct()
    assert grade("1,234", "1, 234") == Correct()
    assert isinstance(grade("234, 1", "1234"), Wrong)
    assert isinstance(grade("(1,234)", "1234"), Wrong)
