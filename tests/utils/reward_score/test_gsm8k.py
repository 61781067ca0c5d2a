"""The dataset's own answers, where it is at hand: `../shared/data/gsm8k` beside the repository."""

import json
import time
from pathlib import Path

import pytest

from verl.utils.reward_score import default_compute_score, prime_math
from verl.utils.reward_score.gsm8k import compute_score, extract_solution


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so it is\n#### 72", "72"),
        ("#### 1,234", "1234"),
        ("#### -5", "-5"),
        ("#### $18", "18"),
        ("#### 3.50", "3.50"),
        ("#### 72.", "72"),
        ("first #### 1 then #### 2", "2"),
        ("the answer is 72", None),
        ("####", None),
        ("", None),
        ("#### 7" + "x" * 300, None),  # too far from the end
    ],
)
def test_the_strict_answer_is_the_last_marked_number(text, answer):
    assert extract_solution(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"), [("it is 72", "72"), ("from 3 to 4.", "4"), ("none", None)]
)
def test_the_flexible_answer_is_the_last_number(text, answer):
    assert extract_solution(text, method="flexible") == answer


def test_a_right_answer_scores_and_a_wrong_one_earns_its_format_at_most():
    assert compute_score("#### 72", "72") == 1.0
    assert compute_score("#### 71", "72") == 0.0
    assert compute_score("#### 71", "72", format_score=0.1) == 0.1
    assert compute_score("72", "72", format_score=0.1) == 0.0
    assert compute_score("#### 72", "72", score=5.0) == 5.0


def test_the_ground_truth_may_be_the_datasets_whole_solution():
    assert compute_score("#### 72", "48+24 = <<48+24=72>>72 clips.\n#### 72") == 1.0
    assert compute_score("#### 1,072", "1072") == 1.0


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="'loose'; it must be one of: strict, flexible"):
        extract_solution("x", method="loose")


@pytest.mark.parametrize("text", ["#" * 10**6, "1," * 10**6, "#### " * 10**6, "9" * 10**6])
def test_long_responses_cost_no_time(text):
    start = time.thread_time()
    compute_score(text, "1")
    compute_score(text, "1", method="flexible")
    assert time.thread_time() - start < 1.0


@pytest.mark.parametrize("source", ["openai/gsm8k", "gsm8k"])
def test_the_data_source_chooses_the_function(source):
    assert default_compute_score(source, "#### 4", "4") == 1.0
    assert default_compute_score(data_source=source, solution_str="x", ground_truth="4") == 0.0


def test_the_old_name_still_works_with_a_warning():
    from verl.utils.reward_score import _default_compute_score

    with pytest.warns(DeprecationWarning, match="default_compute_score"):
        assert _default_compute_score("gsm8k", "#### 4", "4") == 1.0


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


@pytest.mark.parametrize(
    ("response", "gold", "method", "score"),
    [
        # one number, or no answer
        ("#### 5/2", "5", "strict", 0.0),
        ("#### 5/2", "2.5", "strict", 1.0),
        ("#### 5 / 2", "5", "strict", 0.0),
        ("#### 5 or 6", "5", "strict", 0.0),
        ("#### 5 or six", "5", "strict", 0.0),
        ("#### 5 and 6", "5", "strict", 0.0),
        ("#### 5, 6", "5", "strict", 0.0),
        ("#### 5-6", "5", "strict", 0.0),
        ("#### 5e3", "5", "strict", 0.0),
        ("#### 5e3", "5000", "strict", 1.0),
        ("#### 5^2", "5", "strict", 0.0),
        ("#### 5*3", "5", "strict", 0.0),
        ("#### 5 x 3", "5", "strict", 0.0),
        ("#### 5:30", "5", "strict", 0.0),
        ("#### 5 thousand", "5", "strict", 0.0),
        ("#### 10_2", "10", "strict", 0.0),
        ("#### 5²", "5", "strict", 0.0),
        ("#### 5½", "5", "strict", 0.0),
        ("#### 5 ½", "5", "strict", 0.0),
        ("#### 5k", "5", "strict", 0.0),
        ("#### 5 ٦", "5", "strict", 0.0),
        ("#### 5 (or 6)", "5", "strict", 0.0),
        ("#### 5 maybe 6", "5", "strict", 0.0),
        ("#### 3=5", "5", "strict", 0.0),
        ("it is 5/2", "2", "flexible", 0.0),
        ("it is 5/2", "2.5", "flexible", 1.0),
        ("it is 5e3", "3", "flexible", 0.0),
        # the decimal point
        ("The answer is .5", "5", "flexible", 0.0),
        ("The answer is .5", "0.5", "flexible", 1.0),
        ("#### 7 #### .5", "7", "strict", 0.0),
        ("#### .5", ".5", "strict", 1.0),
        ("#### -.5", "-0.5", "strict", 1.0),
        ("#### .5", "5", "strict", 0.0),
        ("#### 5.", "5", "strict", 1.0),
        ("#### 5.00", "5", "strict", 1.0),
        ("it is 5.", "5", "flexible", 1.0),
        # signs
        ("it is −5", "5", "flexible", 0.0),
        ("it is −5", "-5", "flexible", 1.0),
        ("#### −5", "-5", "strict", 1.0),
        ("#### −5", "5", "strict", 0.0),
        ("#### - 5", "-5", "strict", 1.0),
        ("10-5 is 3-5", "5", "flexible", 1.0),
        # thousands and currency
        ("#### 1,234", "1234", "strict", 1.0),
        ("#### 1234", "1,234", "strict", 1.0),
        ("#### 32, 349", "32349", "strict", 0.0),
        ("#### 1,2", "12", "strict", 0.0),
        ("it is 1,2", "12", "flexible", 0.0),
        ("it is $1,234.50.", "1234.5", "flexible", 1.0),
        ("#### $18", "18", "strict", 1.0),
        ("#### -$18", "-18", "strict", 1.0),
        ("#### $-18", "-18", "strict", 1.0),
        ("#### \\$18.00", "18", "strict", 1.0),
        ("#### €18", "18", "strict", 1.0),
        # white space, units, marks, remarks
        ("#### 42\r\n", "42", "strict", 1.0),
        ("####\t42\t", "42", "strict", 1.0),
        ("####\u00a042\u00a0", "42", "strict", 1.0),
        ("####42", "42", "strict", 1.0),
        ("#### **42**", "42", "strict", 1.0),
        ("#### 42 ####", "42", "strict", 1.0),
        ("#### 42\n#### Explanation", "42", "strict", 1.0),
        ("#### 42 apples", "42", "strict", 1.0),
        ("#### 42%", "42", "strict", 1.0),
        ("#### 42 cm^2", "42", "strict", 1.0),
        ("#### 42 m²", "42", "strict", 1.0),
        ("#### 42 km", "42", "strict", 1.0),
        ("#### 42 times", "42", "strict", 1.0),
        ("#### 42 (21 + 21)", "42", "strict", 1.0),
        ("#### 42. I added 21 and 21", "42", "strict", 1.0),
        ("#### 42<|im_end|>", "42", "strict", 1.0),
    ],
)  # fmt: skip
def test_the_answer_is_one_number_compared_by_value(response, gold, method, score):
    assert compute_score(response, gold, method=method) == score
