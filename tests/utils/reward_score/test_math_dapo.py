import pytest

from verl.utils.reward_score.math_dapo import compute_score, normalize_final_answer


@pytest.mark.parametrize(
    ("response", "truth", "answer"),
    [
        ("Answer: 34", "34", "34"),
        ("so...\nAnswer: 34", "34", "34"),
        ("answer : 34\n", "34", "34"),
        ("Answer: 1\nAnswer: 34", "34", "34"),
        ("Answer: $34$", "34", "34"),
        ("Answer: $x = 34$", "34", "34"),
        ("Answer: \\boxed{34}", "34", "34"),
        ("Answer: 34 dollars", "34", "34"),
        ("Answer: 1,234", "1234", "1234"),
        ("Answer: \\frac12", "\\frac{1}{2}", "\\frac{1}{2}"),
        ("Answer: \\text{even}", "even", "even"),
        ("Answer: \\sqrt2", "\\sqrt{2}", "\\sqrt{2}"),
        ("Answer: 30^\\circ", "30", "30"),
        ("Answer: $\\boxed{\\frac{1}{2}}$", "\\frac{1}{2}", "\\frac{1}{2}"),
        ("Answer: \\boxed{\\text{(C)}}", "(C)", "(C)"),
        ("Answer: \\boxed{x^{2^{n}}}", "x^{2^{n}}", "x^{2^{n}}"),
        ("Answer: \\text{ is {even}}", "\\text{is{even}}", "is{even}"),
        ("Answer: \\boxed{\\{1, 2\\}}", "\\{1,2\\}", "\\{1,2\\}"),
        ("Answer: \\dfrac{1}{2}", "\\frac{1}{2}", "\\frac{1}{2}"),
        ("Answer: 42\r\n", "42", "42"),
        ("Answer: 42\t", "42", "42"),
        ("Answer:\u00a042\u00a0", "42", "42"),
        ("Answer: 42.", "42", "42"),
        ("Answer: **42**", "42", "42"),
        ("**Answer:** 42", "42", "42"),
        ("Answer: \u221242", "-42", "-42"),
        ("Answer: $42$.", "42", "42"),
        ("Answer: \\$1,234.50", "1234.50", "1234.50"),
        ("Answer: -1,234", "-1234", "-1234"),
        ("Answer: 1, 2", "1,2", "1,2"),
        ("Answer: 2 + 3 = 5", "5", "5"),
    ],
)
def test_the_right_answer_scores_1(response, truth, answer):
    assert compute_score(response, truth) == {"score": 1.0, "acc": True, "pred": answer}


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Answer: 35", "35"),
        ("34", "[INVALID]"),
        ("", "[INVALID]"),
        ("Answer: 34\nAnswer: 33", "33"),
        ("Answer: 34" + "x" * 400, "[INVALID]"),  # too far from the end
    ],
)
def test_any_other_answer_scores_minus_1(response, answer):
    assert compute_score(response, "34") == {"score": -1.0, "acc": False, "pred": answer}


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("32, 349", "32349"), ("1,2", "12"), ("3=5", "5"), ("10_2", "10"), ("\u22125", "5"),
     (".5", "5"), ("\\boxed{5", "5}"), ("\\frac{1}{2}", "\\frac{2}{1}")],
)  # fmt: skip
def test_an_answer_that_only_looks_alike_scores_minus_1(answer, truth):
    assert compute_score(f"Answer: {answer}", truth)["score"] == -1.0


def test_a_gold_answer_of_a_word_that_is_dropped_is_not_the_empty_answer():
    """Minerva's rules remove `square`; nothing is left of it, and of `units` neither."""
    for answer in ("units", "$$", "x =", "triangle", ""):
        assert compute_score(f"Answer: {answer}", "square")["score"] == -1.0, answer
    for answer in ("square", "a square", "\\boxed{\\text{square}}"):
        assert compute_score(f"Answer: {answer}", "square")["score"] == 1.0, answer


def test_a_strict_box_must_hold_the_very_text():
    assert compute_score(r"\boxed{34}", "34", strict_box_verify=True)["score"] == 1.0
    assert compute_score(r"\boxed{34.0}", "34", strict_box_verify=True) == {
        "score": -1.0, "acc": False, "pred": "34.0",
    }  # fmt: skip
    assert compute_score("Answer: 34", "34", strict_box_verify=True)["pred"] == "[INVALID]"


def test_a_text_that_is_no_answer_is_left_as_it_is():
    assert normalize_final_answer("a " * 10_000) == "a " * 10_000
    assert normalize_final_answer("a 5 ") == "5"
