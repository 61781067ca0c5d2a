import pytest

from verl.utils.reward_score.math_batch import compute_score_batched
from verl.utils.reward_score.math_reward import (
    compute_score,
    is_equiv,
    last_boxed_only_string,
    remove_boxed,
    strip_string,
)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("5", "5"),
        (r"\frac{1}{2}", r"\dfrac{1}{2}"),
        (r"\frac{1}{2}", r"\tfrac12"),
        (r"\frac{1}{72}", r"\frac1{72}"),
        (r"\frac{1}{2}", "1/2"),
        (r"\frac{1}{2}", "0.5"),
        (r"\frac{1}{2}", ".5"),
        (r"\sqrt{3}", r"\sqrt3"),
        (r"\left(1, 2\right)", "(1,2)"),
        ("30", r"30^\circ"),
        ("30", r"30^{\circ}"),
        ("5", r"\$5"),
        ("50", r"50\%"),
        ("5", r"5\text{ cm}"),
        ("5", r"5\text{ cm}^2"),
        (r"\text{ east}", r"\text{ east}"),
        ("5", "x = 5"),
        ("1000", r"1\!000"),
        ("0.25", ".25"),
        ("-5", "\u22125"),
        ("42", "42\r\n"),
        ("42", "\u00a042\t"),
    ],
)
def test_two_spellings_of_one_answer_are_equivalent(one, other):
    assert is_equiv(one, other)
    assert is_equiv(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("5", "6"),
        ("0.25", r"\frac{1}{4}"),  # texts are compared here, not values
        ("2,1", "1,2"),
        ("abc = 5", "5"),
        (r"\frac{1}{2}", r"\frac{2}{1}"),
        ("5", None),
        ("3=5", "5"),
        ("32, 349", "32349"),
        ("10_2", "10"),
        (r"5\text{ or 6}", "5"),
        (r"5\text{ and more}", "5"),
        (r"\text{ west}", r"\text{ east}"),  # a unit of nothing
        ("%", r"\%5"),
    ],
)
def test_other_texts_are_not(one, other):
    assert not is_equiv(one, other)


def test_no_answer_equals_no_answer():
    assert is_equiv(None, None)


def test_the_score_is_1_for_the_right_last_box():
    assert compute_score(r"first \boxed{1}, then \boxed{\dfrac{1}{2}}.", r"\frac{1}{2}") == 1.0
    assert compute_score(r"first \boxed{\frac{1}{2}}, then \boxed{1}.", r"\frac{1}{2}") == 0.0
    assert compute_score(r"\frac{1}{2}", r"\frac{1}{2}") == 0.0
    assert compute_score(r"\boxed{\frac{1}{2}", r"\frac{1}{2}") == 0.0
    assert compute_score("", "5") == 0.0


def test_a_batch_is_scored_in_order():
    scores = compute_score_batched(
        data_sources=["m"] * 3,
        solution_strs=[r"\boxed{1}", r"\boxed{2}", "3"],
        ground_truths=["1", "3", "3"],
        extra_infos=[None] * 3,
    )
    assert scores == [1.0, 0.0, 0.0]


def test_the_box_is_found_with_its_command_and_opened():
    assert last_boxed_only_string(r"a \boxed{b} c") == r"\boxed{b}"
    assert last_boxed_only_string("a") is None
    assert remove_boxed(r"\boxed{b}") == "b"
    assert strip_string("x" * 20_000) == "x" * 20_000
