import pytest

from tests.utils.reward_score.math_grader.pairs import pairs
from verl.utils.reward_score.math_grader import Abstain, Correct, Wrong, grade

VERDICTS = {"=": Correct, "!": Wrong, "?": Abstain}
REFLEXIVE = sorted({gold for gold, _, verdict in pairs() if gold and verdict == "="})


@pytest.mark.parametrize(("gold", "answer", "verdict"), pairs())
def test_the_verdict_is_the_one_worked_by_hand(gold, answer, verdict):
    assert isinstance(grade(answer, gold), VERDICTS[verdict]), grade(answer, gold)


def test_the_table_has_hundreds_of_pairs_of_every_kind():
    verdicts = [verdict for _, _, verdict in pairs()]
    assert len(verdicts) >= 400
    assert {verdict: verdicts.count(verdict) > 10 for verdict in VERDICTS} == {
        "=": True, "!": True, "?": True,
    }  # fmt: skip


def test_every_gold_answer_equals_itself_whatever_surrounds_it():
    for gold in REFLEXIVE:
        for answer in (gold, f"$ {gold} $.", f"\\boxed{{{gold}}}", f"  {gold}\\ "):
            assert grade(answer, gold) == Correct(), f"{answer!r} should equal {gold!r}"


@pytest.mark.parametrize(
    ("gold", "answer", "reason"),
    [
        ("5", "6", "the numbers differ"),
        ("5", "(5", r"not mathematics: 'the end' stands where \) or \] or \[ should"),
        ("5", "", "there is no answer"),
        ("5", r"\int x", r"the command \\int is not known"),
        ("5", "x" * 2001, "the text is too long"),
        ("5", "(" * 30 + "5" + ")" * 30, "nested more than 24 deep"),
        (r"\int x", "5", r"the gold answer cannot be read: the command \\int"),
        (r"\frac{1}{0}", "5", "the gold answer has no value: a division by zero"),
        (r"5\text{ apples}", r"5\text{ pears}", "'pear' is another name for 'apple'"),
        (r"\ln 2", r"\log 2", "the base of a logarithm is not given, and matters"),
    ],
)
def test_a_verdict_says_why(gold, answer, reason):
    verdict = grade(answer, gold)
    assert not isinstance(verdict, Correct)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(verdict.reason)


def test_a_comma_may_group_digits_or_separate_numbers_but_not_both_at_once():
    assert grade("1,234", "1234") == Correct()
    assert grade("234, 1", "1,234") == Correct()
    assert isinstance(grade("234, 1", "1234"), Wrong)
    assert isinstance(grade("(1,234)", "1234"), Wrong)
