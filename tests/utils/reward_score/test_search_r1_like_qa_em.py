import numpy as np
import pytest

from verl.utils.reward_score.search_r1_like_qa_em import compute_score, em_check, extract_solution

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
