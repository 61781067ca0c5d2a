"""The dataset's own answers, where it is at hand: `../shared/data/gsm8k` beside the repository."""

import json
from pathlib import Path

import pytest

from verl.utils.reward_score import prime_math
from verl.utils.reward_score.gsm8k import compute_score, extract_solution

DATASET = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "test.jsonl"


@pytest.fixture(scope="module")
def solutions() -> list[str]:
    if not DATASET.is_file():
        pytest.skip(f"needs the GSM8K test set at {DATASET}")
    return [json.loads(line)["answer"] for line in DATASET.read_text().splitlines()]


def test_every_solution_of_the_test_set_scores_1_against_itself(solutions):
    assert len(solutions) == 1319
    assert [compute_score(text, text) for text in solutions] == [1.0] * 1319
    assert [compute_score(text, text, method="flexible") for text in solutions] == [1.0] * 1319


def test_every_solution_scores_1_by_value_and_0_with_another_number(solutions):
    for text in solutions:
        gold = extract_solution(text)
        assert prime_math.compute_score(f"so it is \\boxed{{{gold}}}", gold)[0] == 1.0
        assert prime_math.compute_score(f"so it is \\boxed{{{gold}1}}", gold)[0] == 0.0
        assert compute_score(f"#### {gold}1", gold) == 0.0
