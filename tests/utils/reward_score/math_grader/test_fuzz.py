"""Any text gets a verdict: the grader raises nothing, whatever it is given."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.utils.reward_score.math_grader.corpus import read
from verl.utils.reward_score.math_grader import Abstain, Correct, Wrong, final_answer, grade

PIECES = [
    *"0123456789xyzabneiC+-*/^_!()[]{}|,;:=<>%'&.$ ", "\\frac", "\\sqrt", "\\binom", "\\pi", "\\{",
    "\\}", "\\left", "\\right", "\\sin", "\\log", "\\ln", "\\pm", "\\mp", "\\cup", "\\in",
    "\\infty", "\\begin{pmatrix}", "\\end{pmatrix}", "\\\\", "\\text{cm}", "\\text{ and }",
    "\\circ", "^\\circ", "\\approx", "\\le", "1,234", "0.\\overline{3}", "10_2", "{,}", "sqrt",
    "\\lfloor", "\\rfloor",
    "\\emptyset", "\\mathbb{R}", "word", "\\boxed{", "\\,", "é", "²", "∞", "\\overline{AB}", "1e5",
]  # fmt: skip


@pytest.mark.parametrize("num_pieces", [2, 3, 5, 9, 20, 60])
def test_random_pieces_of_mathematics_always_get_a_verdict(num_pieces):
    choose = random.Random(num_pieces)
    for _ in range(600):
        answer = "".join(choose.choices(PIECES, k=num_pieces))
        gold = choose.choice(["5", "x+1", "(1,2)", "\\{1,2\\}", "x=5", "50\\%", answer[::-1]])
        assert isinstance(grade(answer, gold), Correct | Wrong | Abstain)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60), st.text(max_size=60))
def test_any_two_texts_get_a_verdict(answer, gold):
    assert isinstance(grade(answer, gold), Correct | Wrong | Abstain)
    final_answer(answer + gold)


def test_damaged_answers_are_never_taken_for_the_gold_answer_by_accident():
    """One character less is another answer, unless the pair still reads the same."""
    choose = random.Random(0)
    golds = sorted({row["gold"] for row in read()})
    digits = [gold for gold in golds if sum(c.isdigit() for c in gold) >= 3]
    for gold in digits:
        where = choose.choice([k for k, c in enumerate(gold) if c.isdigit() and c != "0"])
        damaged = gold[:where] + str((int(gold[where]) + 1) % 10) + gold[where + 1 :]
        assert grade(damaged, gold) != Correct(), (damaged, gold)
