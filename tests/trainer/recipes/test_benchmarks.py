"""R1's benchmarks and ReTool's score: what counts as right."""

import pytest

from recipe.r1.data_process import gpqa_row
from recipe.r1.reward_score import reward_func
from recipe.retool.retool import compute_score


@pytest.mark.parametrize(
    ("said", "score"),
    [("Answer: B", 1.0), ("Answer: A\nno, Answer: **B**", 1.0), ("answer: (C)", 0.0), ("B", 0.0)],
)
def test_the_last_choice_counts(said, score):
    assert reward_func("Idavidrein/gpqa", said, "B") == score


def test_an_unknown_benchmark_is_no_zero():
    with pytest.raises(ValueError, match="no rule for data_source 'trivia'"):
        reward_func("trivia", "Answer: B", "B")


def test_choices_are_shuffled_by_row_and_the_answer_follows():
    row = {"Question": "Q?", "Correct Answer": "right"}
    row |= {f"Incorrect Answer {number}": f"wrong {number}" for number in (1, 2, 3)}
    letters = set()
    for index in range(12):
        made = gpqa_row(row, index)
        letter = made["reward_model"]["ground_truth"]
        assert f"{letter}) right" in made["prompt"][0]["content"]
        assert gpqa_row(row, index) == made
        letters.add(letter)
    assert len(letters) > 1


def test_retool_scores_the_boxed_answer_alone():
    assert compute_score("m", "so \\boxed{42}", "42", {"num_turns": 4})["score"] == 1.0
    wrong = compute_score("m", "42 is near \\boxed{41}", "42")
    assert (wrong["score"], wrong["num_turns"]) == (-1.0, 0.0)
