"""Which function a data source gets, and what comes back."""

import shutil
from pathlib import Path

import pytest

from verl.utils import reward_score
from verl.utils.reward_score import default_compute_score, graders_identity, scorers

MATH = {"solution_str": r"\boxed{\dfrac{1}{2}}", "ground_truth": r"\frac{1}{2}"}
DAPO = {"solution_str": "Answer: 5", "ground_truth": "5"}
RIGHT = {"score": 1.0, "acc": True, "pred": "5"}
BY_VALUE = {"solution_str": r"\boxed{0.5}", "ground_truth": r"\frac{1}{2}"}
SEARCH = {"solution_str": "<answer>Paris</answer>", "ground_truth": {"target": ["paris"]}}


@pytest.mark.parametrize(
    ("source", "row", "result"),
    [
        ("openai/gsm8k", {"solution_str": "#### 5", "ground_truth": "5"}, 1.0),
        ("lighteval/MATH", MATH, 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", MATH, 1.0),
        ("HuggingFaceH4/MATH-500", MATH, 1.0),
        ("HuggingFaceH4/MATH-500", {**MATH, "ground_truth": "1"}, 0.0),
        ("math_dapo", DAPO, RIGHT),
        ("math", DAPO, RIGHT),
        ("math_dapo_reasoning", DAPO, RIGHT),
        ("aime", DAPO, RIGHT),
        ("aime_2024", DAPO, RIGHT),
        ("aime2025", DAPO, RIGHT),
        ("numina_aops_forum", BY_VALUE, 1.0),
        ("numina_synthetic_math", BY_VALUE, 1.0),
        ("numina_amc_aime", BY_VALUE, 1.0),
        ("numina_synthetic_amc", BY_VALUE, 1.0),
        ("numina_cn_k12", BY_VALUE, 1.0),
        ("numina_olympiads", BY_VALUE, 1.0),
        ("hiyouga/geometry3k", BY_VALUE, 0.9),
        ("searchR1_nq", SEARCH, 1.0),
        ("searchR1_triviaqa", SEARCH, 1.0),
        ("searchR1_popqa", SEARCH, 1.0),
        ("searchR1_hotpotqa", SEARCH, 1.0),
        ("searchR1_2wikimultihopqa", SEARCH, 1.0),
        ("searchR1_musique", SEARCH, 1.0),
        ("searchR1_bamboogle", SEARCH, 1.0),
    ],
)
def test_the_data_source_chooses_the_function(source, row, result):
    found = default_compute_score(source, **row)
    assert found == result
    assert isinstance(found, dict if isinstance(result, dict) else float)


@pytest.mark.parametrize("source", ["numina_olympiads", "hiyouga/geometry3k"])
def test_what_the_grader_cannot_judge_has_no_score(source):
    assert default_compute_score(source, r"\boxed{5!!}", "5") is None


@pytest.mark.parametrize("source", ["riddles", "Aime", "gsm8k/other", ""])
def test_an_unknown_data_source_lists_those_that_are_known(source):
    with pytest.raises(
        NotImplementedError, match=rf"data_source='{source}'.*path.*gsm8k.*taco, aime\*"
    ):
        default_compute_score(source, "x", "y")


@pytest.mark.parametrize("source", ["codecontests", "apps", "codeforces", "taco"])
def test_code_has_a_function_for_each_of_its_data_sources(source):
    assert scorers[source] is scorers["apps"]


def test_other_source_of_the_graders_is_another_identity(tmp_path, monkeypatch):
    shutil.copytree(Path(reward_score.__file__).parent, tmp_path / "graders")
    before = graders_identity()
    monkeypatch.setattr(reward_score, "__file__", str(tmp_path / "graders" / "__init__.py"))
    assert graders_identity() == before
    with open(tmp_path / "graders" / "math_grader" / "numbers.py", "a") as file:
        file.write("# changed")
    assert graders_identity() != before


def test_an_unknown_data_source_is_told_the_way_out_before_a_report_cuts_the_message():
    fault = reward_score.grading_fault("mine", "5")
    assert "data_source='mine'; set custom_reward_function.path" in fault[:150]
