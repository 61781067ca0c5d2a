"""The scorers of mathematics: MATH, DAPO, values, and exact match of answers."""

import numpy as np
import pytest

from verl.utils.reward_score import geo3k, prime_math
from verl.utils.reward_score.math_batch import compute_score_batched
from verl.utils.reward_score.math_dapo import compute_score, normalize_final_answer
from verl.utils.reward_score.math_reward import (
    compute_score,
    is_equiv,
    last_boxed_only_string,
    remove_boxed,
    strip_string,
)
from verl.utils.reward_score.search_r1_like_qa_em import compute_score, em_check, extract_solution


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
        ("5", "x = 5"),
        ("1000", r"1\!000"),
        ("0.25", ".25"),
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


def test_a_strict_box_must_hold_the_very_text():
    assert compute_score(r"\boxed{34}", "34", strict_box_verify=True)["score"] == 1.0
    assert compute_score(r"\boxed{34.0}", "34", strict_box_verify=True) == {
        "score": -1.0, "acc": False, "pred": "34.0",
    }  # fmt: skip
    assert compute_score("Answer: 34", "34", strict_box_verify=True)["pred"] == "[INVALID]"


def test_a_text_that_is_no_answer_is_left_as_it_is():
    assert normalize_final_answer("a " * 10_000) == "a " * 10_000
    assert normalize_final_answer("a 5 ") == "5"


@pytest.mark.parametrize(
    ("response", "truth", "result"),
    [
        (r"so \boxed{\frac{2}{4}}", "0.5", (1.0, 1.0, r"\frac{2}{4}")),
        (r"so \boxed{0.51}", "0.5", (0.0, 1.0, "0.51")),
        ("The answer is 1/2", "0.5", (1.0, 1.0, "1/2")),
        ("half", "0.5", (0.0, 0.0, "")),
        (r"\boxed{9^{9^{9^9}}}", "0.5", (None, 1.0, "9^{9^{9^9}}")),
        (r"\boxed{(x-1)(x+1)}", "x^2-1", (1.0, 1.0, "(x-1)(x+1)")),
        (r"\boxed{5}", 5, (1.0, 1.0, "5")),
    ],
)
def test_prime_math_scores_by_value_and_abstains_where_it_cannot(response, truth, result):
    assert prime_math.compute_score(response, truth) == result


GOOD = r"<think>a circle</think> so \boxed{8\pi}"


def test_geo3k_gives_nine_tenths_for_the_answer_and_one_for_the_format():
    assert geo3k.compute_score(GOOD, r"8\pi") == pytest.approx(1.0)
    assert geo3k.compute_score(GOOD, r"9\pi") == pytest.approx(0.1)
    assert geo3k.compute_score(r"\boxed{8\pi}", r"8\pi") == pytest.approx(0.9)
    assert geo3k.compute_score("eight pi", r"8\pi") == 0.0
    assert geo3k.compute_score(GOOD, r"9\pi", format_score=0.5) == pytest.approx(0.5)
    assert geo3k.compute_score(r"8\pi", r"8\pi", use_boxed=False) == pytest.approx(0.9)


def test_geo3k_abstains_where_the_grader_does():
    assert geo3k.compute_score(r"\boxed{\int x}", "5") is None


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (GOOD, 1.0),
        (" " + GOOD, 0.0),
        (r"<think>a</think>", 0.0),
        (r"<think>\boxed{1}</think>", 0.0),
        (r"<think>a \boxed{1}", 0.0),
        (r"<think>a</think>\boxed{1", 0.0),
        (r"<think></think>\boxed{}", 1.0),
        ("", 0.0),
    ],
)
def test_the_format_is_a_thought_and_then_a_box(text, score):
    assert geo3k.format_reward(text) == score


TRUTH = {"target": ["Paris", "City of Paris"]}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>Paris</answer>", "Paris"),
        ("<answer> Rome </answer> no <answer>\nParis\n</answer>", "Paris"),
        ("<answer>a<answer>b</answer>", "a<answer>b"),
        ("<answer>Paris</answer> <answer>cut", "Paris"),
        ("</answer><answer>", None),
        ("Paris", None),
    ],
)
def test_the_answer_is_in_the_last_pair_of_tags(text, answer):
    assert extract_solution(text) == answer


@pytest.mark.parametrize("answer", ["Paris", "paris.", "the  PARIS", "city of paris!"])
def test_case_punctuation_articles_and_spaces_do_not_matter(answer):
    assert compute_score(f"<answer>{answer}</answer>", TRUTH) == 1.0


def test_another_answer_earns_its_format_at_most_and_none_earns_nothing():
    assert compute_score("<answer>Rome</answer>", TRUTH) == 0.0
    assert compute_score("<answer>Rome</answer>", TRUTH, format_score=0.2) == 0.2
    assert compute_score("Paris", TRUTH, format_score=0.2) == 0.0
    assert compute_score("<answer>Paris</answer>", TRUTH, score=2.0) == 2.0


def test_fishing_with_more_than_ten_answers_earns_a_quarter():
    ten = "<answer>Rome</answer>" * 9 + "<answer>Paris</answer>"
    assert compute_score(ten, TRUTH) == 1.0
    assert compute_score("<answer>Oslo</answer>" + ten, TRUTH) == 0.25


def test_targets_may_be_one_text_or_an_array_as_parquet_gives_them():
    assert em_check("Paris", "paris")
    assert em_check("Paris", np.array(["Rome", "Paris"], dtype=object))
    assert not em_check("Paris", [])
