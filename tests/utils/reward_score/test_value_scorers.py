"""Scorers that compare values: prime_math and geo3k."""

import pytest

from verl.utils.reward_score import geo3k, prime_math


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
    assert geo3k.compute_score(r"\boxed{5!!}", "5") is None


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
