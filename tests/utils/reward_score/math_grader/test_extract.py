import pytest

from verl.utils.reward_score.math_grader.grade import final_answer, last_boxed, unboxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{4} no, \boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}} and more }", r"\{1,2\}"),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed {5}", "5"),
        (r"$\boxed 5$ or so", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed{5", None),
        (r"\boxed{4} and \boxed{5", None),
        (r"\boxed{5" + "x" * 10_000 + "}", None),
        (r"\boxed", None),
        (r"\boxed{}", ""),
        ("The answer is 5", "5"),
        ("Answer: 5\nbye", "5"),
        ("the answer is 4. No: ANSWER: 5", "5"),
        ("the answer is: 5", "5"),
        ("Answer: 4, but the answer is 5", "5"),
        ("the answer is", None),
        ("five", None),
        ("", None),
    ],
)
def test_the_final_answer_is_the_last_box_or_what_the_text_calls_its_answer(text, answer):
    assert final_answer(text) == answer


def test_a_box_keeps_its_command_until_it_is_opened():
    assert last_boxed(r"a \boxed{b{c}d} e") == r"\boxed{b{c}d}"
    assert last_boxed("no box") is None
    assert unboxed(r"\boxed{b{c}d}") == "b{c}d"
    with pytest.raises(ValueError, match=r"'5' is not a box; it should look like \\boxed"):
        unboxed("5")
