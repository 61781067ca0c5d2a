import json
import re
import runpy
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tests.pace import pace
from verl.config.faults import ConfigError
from verl.config.generation import EvaluationConfig
from verl.config.load import load_config
from verl.trainer import main_eval
from verl.trainer.evaluation.grading import Unscored
from verl.trainer.evaluation.run import (
    PromptScores,
    as_json,
    estimate,
    evaluate,
    make_grader,
    summarise,
    unscored_lines,
    wilson_interval,
)
from verl.utils.dataset.tables import DataError

GRADER = '''
import os, time

def compute_score(source, text, truth):
    """Its parameters have names of their own: it is called by position."""
    if text == "hang":
        time.sleep(1000)
    if text == "die":
        os._exit(9)
    if text == "raise":
        raise KeyError("no such unit")
    if text == "abstain":
        return None
    if text == "nan":
        return float("nan")
    if text == "right but long":
        return {"score": 0.4, "acc": True, "pred": "7"}
    return float(text == truth)

async def by_waiting(source, text, truth):
    return float(text == truth)

def with_bonus(source, text, truth, bonus):
    return float(text == truth) + bonus

def whole_batch(data):
    raise AssertionError("never called")
'''


@pytest.fixture
def grader(tmp_path):
    file = tmp_path / "grader.py"
    file.write_text(GRADER)
    return str(file)


def row(responses, truth="right", source="quiz"):
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": "?"}],
        "responses": responses,
        "reward_model": {"style": "rule", "ground_truth": truth},
    }


def written(tmp_path, rows):
    file = tmp_path / "responses.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), file)
    return str(file)


def config_of(path, grader=None, **changes):
    values = {
        "data": {"path": path},
        "custom_reward_function": {"path": grader},
        "grading": {"num_workers": 2, "timeout_seconds": 20.0},
    }
    for section, options in changes.items():
        values[section] = {**values.get(section, {}), **options}
    return load_config(values, EvaluationConfig).checked()


# ---- the numbers ---------------------------------------------------------------------------------


def test_every_prompt_counts_the_same_however_many_responses_it_has():
    prompts = [PromptScores([1.0], 1), PromptScores([0.0, 0.0, 0.0, 1.0], 1)]
    summary = summarise(prompts, num_unscored=0)
    assert summary.mean is not None
    assert summary.mean.value == pytest.approx((1 + 0.25) / 2)
    assert (summary.num_prompts, summary.num_scored) == (2, 5)


def test_pass_at_k_is_the_unbiased_estimate_over_the_prompts_with_k_responses():
    prompts = [PromptScores([1.0, 0.0, 0.0, 0.0], 1), PromptScores([0.0, 0.0], 0)]
    found = summarise(prompts, num_unscored=0).pass_at
    # 1 - C(3, 2) / C(4, 2) = 1/2; the second prompt has only two responses, none of them right
    assert {k: one.value for k, one in found.items()} == {
        1: pytest.approx((0.25 + 0) / 2),
        2: pytest.approx((0.5 + 0) / 2),
        4: 1.0,
    }
    assert {k: one.num_prompts for k, one in found.items()} == {1: 2, 2: 2, 4: 1}


def test_wilson_interval_of_five_out_of_ten():
    assert wilson_interval(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)


def test_ten_right_answers_out_of_ten_do_not_prove_perfection():
    found = estimate([1.0] * 10)
    assert found.method == "Wilson"
    assert found.low == pytest.approx(10 / (10 + 1.959964**2))
    assert found.high == 1.0


def test_other_values_have_an_interval_of_standard_errors_over_prompts():
    found = estimate([0.0, 0.5, 1.0, 0.5])
    # standard deviation sqrt(0.5 / 3), so the standard error is sqrt(0.5 / 12) = 0.204124
    assert found.method == "normal"
    assert (found.low, found.high) == pytest.approx((0.5 - 0.400076, 0.5 + 0.400076), abs=1e-5)


def test_the_interval_of_pass_at_k_stays_between_0_and_1():
    prompts = [PromptScores([1.0, 0.0], 1), PromptScores([1.0, 1.0], 2)]
    summary = summarise(prompts, num_unscored=0)
    assert summary.mean is not None
    # 0.75 with a standard error of 0.25; a mean score has no bounds that are known here
    assert (summary.mean.low, summary.mean.high) == pytest.approx((0.26, 1.24), abs=1e-2)
    assert summary.pass_at[1].low == summary.mean.low
    assert summary.pass_at[1].high == 1.0


def test_a_single_prompt_with_a_mean_between_has_no_interval():
    found = estimate([0.5])
    assert (found.value, found.low, found.high, found.method) == (0.5, None, None, "none")


def test_a_source_without_any_score_has_no_mean():
    summary = summarise([PromptScores()], num_unscored=1)
    assert summary.mean is None
    assert summary.pass_at == {}
    assert (summary.num_prompts, summary.num_scored, summary.num_unscored) == (1, 0, 1)


# ---- grading -------------------------------------------------------------------------------------


def test_a_dry_run_looks_at_the_file_and_grades_nothing(tmp_path, grader, capsys):
    path = written(tmp_path, [row(["right"]), row(["hang"])])
    values = {"data": {"path": path}, "custom_reward_function": {"path": grader}}
    values["trainer"] = {"dry_run": True}
    main_eval.run(load_config(values, EvaluationConfig))
    said = capsys.readouterr().out
    assert f"grade the responses of 2 rows in {path}" in said
    assert "test_score" not in said


def test_each_source_has_its_own_mean(tmp_path, grader):
    rows = [
        row(["right", "wrong"]),
        row(["right", "right"]),
        row(["wrong"], source="other"),
    ]
    found = evaluate(config_of(written(tmp_path, rows), grader)).sources
    assert list(found) == ["other", "quiz"]
    assert found["quiz"].mean.value == 0.75
    assert found["quiz"].pass_at[2].value == 1.0
    assert found["other"].mean.value == 0.0


def test_what_cannot_be_scored_is_listed_and_is_in_none_of_the_numbers(tmp_path, grader):
    rows = [
        row(["right", "raise"]),
        row(["abstain", "nan"]),
        row(["die", "right"]),
        row(["hang", "wrong"]),
    ]
    limit = 2.0 * pace()
    config = config_of(written(tmp_path, rows), grader, grading={"timeout_seconds": limit})
    found = evaluate(config)  # ends, though one call does not
    reasons = {(one.row, one.number): one.reason for one in found.unscored}
    assert list(reasons) == [(1, 2), (2, 1), (2, 2), (3, 1), (4, 1)]
    assert "raised KeyError: 'no such unit'" in reasons[1, 2]
    assert "returned None" in reasons[2, 1]
    assert "returned nan" in reasons[2, 2]
    assert "died" in reasons[3, 1]
    assert f"took longer than {limit} s" in reasons[4, 1]
    quiz = found.sources["quiz"]
    assert (quiz.num_prompts, quiz.num_scored, quiz.num_unscored) == (4, 3, 5)
    assert quiz.mean.value == pytest.approx(2 / 3)
    assert quiz.mean.num_prompts == 3


def test_responses_behind_many_that_hang_are_graded(tmp_path, grader, caplog):
    path = written(tmp_path, [row(["hang"] * 4 + ["right"])])
    grading = {"num_workers": 2, "timeout_seconds": 1.0}
    found = evaluate(config_of(path, grader, grading=grading))
    assert [one.number for one in found.unscored] == [1, 2, 3, 4]
    assert found.sources["quiz"].mean.value == 1.0
    assert not caplog.records, "they are in the report"


def test_the_number_of_workers_does_not_change_the_result(tmp_path, grader):
    rows = [row(["right" if (place + n) % 3 else "wrong" for n in range(4)]) for place in range(9)]
    path = written(tmp_path, rows)
    one = evaluate(config_of(path, grader, grading={"num_workers": 1}))
    assert one == evaluate(config_of(path, grader, grading={"num_workers": 3}))


def test_ray_init_num_cpus_is_the_number_of_workers_of_older_scripts(grader):
    def num_workers(**changes):
        made = make_grader(len, config_of("x", **changes))
        made.close()
        return made.max_concurrent

    ray = {"ray_init": {"num_cpus": 3}}
    assert num_workers(grading={"num_workers": None}, ray_kwargs=ray) == 3
    assert num_workers(grading={"num_workers": 5}, ray_kwargs=ray) == 5
    assert num_workers(grading={"num_workers": None}) >= 1


@pytest.mark.ray
@pytest.mark.slow
def test_on_ray_the_result_is_the_same_and_a_hanging_function_is_cut_off(
    tmp_path, grader, ray_cluster
):
    rows = [row(["right", "wrong"]), row(["hang", "right"]), row(["raise", "die"])]
    path = written(tmp_path, rows)
    here = config_of(path, grader, grading={"timeout_seconds": 2.0})
    quiet = {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False}
    there = config_of(
        path,
        grader,
        grading={"timeout_seconds": 2.0, "controller": "ray"},
        ray_kwargs={"ray_init": quiet},
    )
    assert without_numbers(evaluate(there)) == without_numbers(evaluate(here))


def without_numbers(found):
    """Reasons tell which process ended, and during which call."""
    unscored = [replace(one, reason=re.sub(r"\d+", "N", one.reason)) for one in found.unscored]
    return replace(found, unscored=unscored)


def test_acc_decides_what_passes_and_the_score_what_the_mean_is(tmp_path, grader):
    found = evaluate(config_of(written(tmp_path, [row(["right but long", "wrong"])]), grader))
    quiz = found.sources["quiz"]
    assert quiz.mean.value == 0.2  # (0.4 + 0) / 2
    assert quiz.pass_at[1].value == 0.5


def test_the_threshold_says_from_where_on_a_response_passes(tmp_path, grader):
    rows = [row(["right", "wrong"])]
    bonus = {"name": "with_bonus", "reward_kwargs": {"bonus": 0.25}}
    found = evaluate(
        config_of(
            written(tmp_path, rows),
            grader,
            custom_reward_function={"path": grader, **bonus},
            grading={"pass_threshold": 0.2},
        )
    ).sources["quiz"]
    assert found.mean.value == 0.75  # (1.25 + 0.25) / 2
    assert found.pass_at[1].value == 1.0


def test_an_async_function_is_awaited(tmp_path, grader):
    rows = [row(["right", "wrong"])]
    function = {"path": grader, "name": "by_waiting"}
    found = evaluate(config_of(written(tmp_path, rows), custom_reward_function=function))
    assert found.unscored == []
    assert found.sources["quiz"].mean.value == 0.5


def test_without_a_function_the_data_source_chooses(tmp_path):
    rows = [
        row(["so #### 5", "#### 6"], truth="5", source="openai/gsm8k"),
        row(["5"], truth="5", source="nobody/knows"),
        row(["#### 5"], truth=None, source="openai/gsm8k"),
    ]
    found = evaluate(config_of(written(tmp_path, rows)))
    assert found.sources["openai/gsm8k"].mean.value == 0.5
    assert found.sources["openai/gsm8k"].mean.num_prompts == 1
    assert found.sources["nobody/knows"].mean is None
    assert [one.row for one in found.unscored] == [2, 3]
    assert "no built-in reward function for data_source='nobody/knows'" in found.unscored[0].reason
    assert "there is no ground_truth in 'reward_model'" in found.unscored[1].reason


def test_a_function_of_ones_own_may_do_without_an_answer(tmp_path, grader):
    found = evaluate(config_of(written(tmp_path, [row(["x"], truth=None)]), grader))
    assert found.unscored == []


# ---- the file ------------------------------------------------------------------------------------


def test_one_text_is_one_response_and_an_answer_may_have_a_column_of_its_own(tmp_path, grader):
    file = tmp_path / "rows.jsonl"
    lines = [
        {"data_source": "quiz", "text": "right", "answer": "right"},
        {"data_source": "quiz", "text": "right", "ground_truth": "wrong"},
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = evaluate(config_of(str(file), grader, data={"response_key": "text"}))
    assert found.sources["quiz"].mean.value == 0.5


def test_rows_that_lack_responses_are_listed(tmp_path, grader):
    rows = [row(["right"]), row([]), row(None), row(["right", None])]
    found = evaluate(config_of(written(tmp_path, rows), grader))
    assert [(one.row, one.number, one.reason) for one in found.unscored] == [
        (2, None, "there are no responses in 'responses'"),
        (3, None, "there are no responses in 'responses'"),
        (4, 2, "the response is NoneType, not text"),
    ]
    assert found.sources["quiz"].mean.value == 1.0


def test_a_line_that_is_not_json_is_listed(tmp_path, grader):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row(["right"])) + "\nnot json\n")
    found = evaluate(config_of(str(file), grader))
    assert [one.row for one in found.unscored] == [2]
    assert found.sources["quiz"].mean.value == 1.0


def test_a_missing_column_is_an_error_that_suggests_the_right_name(tmp_path, grader):
    path = written(tmp_path, [row(["right"])])
    with pytest.raises(DataError, match=r"no column 'response' .*did you mean 'responses'\?"):
        evaluate(config_of(path, grader, data={"response_key": "response"}))


def test_a_function_for_whole_batches_is_refused(tmp_path, grader):
    path = written(tmp_path, [row(["right"])])
    function = {"path": grader, "name": "whole_batch"}
    with pytest.raises(ConfigError, match="takes a whole batch; evaluation calls a function once"):
        evaluate(config_of(path, custom_reward_function=function))


# ---- the report ----------------------------------------------------------------------------------


def test_the_list_of_unscored_responses_is_short_and_safe_to_print():
    unscored = [Unscored(n, 1, "quiz", f"bad \x1b[31m{n}") for n in range(1, 26)]
    lines = list(unscored_lines(unscored))
    assert lines[0] == "25 without a score, in none of the numbers:"
    assert lines[1] == "  row 1, response 1: bad \\x1b[31m1"
    assert lines[-1] == "  and 5 more (data.output_path lists all)"
    assert len(lines) == 22
    assert list(unscored_lines([])) == []


def test_the_json_result_has_every_number_and_every_unscored_response(tmp_path, grader):
    found = evaluate(config_of(written(tmp_path, [row(["right", "raise"])]), grader))
    document = json.loads(as_json(found, "responses.parquet", 1.0))
    assert document["test_scores"] == {"test_score/quiz": 1.0}
    assert document["sources"]["quiz"]["mean"]["method"] == "Wilson"
    assert document["sources"]["quiz"]["pass_at"]["1"]["value"] == 1.0
    (unscored,) = document["unscored"]
    assert (unscored["row"], unscored["number"]) == (1, 2)


# ---- the command ---------------------------------------------------------------------------------


def command(monkeypatch, tmp_path, *arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["main_eval", "grading.num_workers=1", *arguments])
    main_eval.main()


def test_the_command_prints_a_table_and_the_scores(tmp_path, monkeypatch, capsys, grader):
    path = written(tmp_path, [row(["right", "wrong"]), row(["right", "raise"])])
    command(
        monkeypatch, tmp_path, f"data.path={path}", f"custom_reward_function.path={grader}",
        "data.output_path=results/quiz.json",
    )  # fmt: skip
    shown = capsys.readouterr()
    lines = shown.out.strip().splitlines()
    assert json.loads(lines[-1]) == {"test_score/quiz": 0.75}
    assert lines[1].split()[:3] == ["quiz", "mean", "0.7500"]
    assert "row 2, response 2: the reward function raised KeyError" in shown.err
    written_result = json.loads((tmp_path / "results" / "quiz.json").read_text())
    assert written_result["test_scores"] == {"test_score/quiz": 0.75}


def test_the_command_refuses_a_misspelt_key(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        command(monkeypatch, tmp_path, "data.pth=x.parquet")
    assert "did you mean data.path?" in capsys.readouterr().err


def test_the_command_refuses_a_file_that_is_not_there(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        command(monkeypatch, tmp_path, "data.path=nowhere.parquet")
    assert "which does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("custom_reward_function.path=nowhere.py", "there is no module file"),
        ("custom_reward_function.name=compute_scor", "Did you mean 'compute_score'?"),
        ("data.output_path=.", "a folder; it must be a file"),
    ],
)
def test_the_command_refuses(tmp_path, monkeypatch, capsys, grader, argument, message):
    path = written(tmp_path, [row(["right"])])
    given = [f"data.path={path}", f"custom_reward_function.path={grader}", argument]
    with pytest.raises(SystemExit, match="2"):
        command(monkeypatch, tmp_path, *given)
    assert message in capsys.readouterr().err


def test_bad_data_and_nothing_scored_have_exit_codes_of_their_own(
    tmp_path, monkeypatch, capsys, grader
):
    path = written(tmp_path, [row(["raise"])])
    with pytest.raises(SystemExit, match="65"):
        command(monkeypatch, tmp_path, f"data.path={path}", "data.response_key=answers")
    with pytest.raises(SystemExit, match="70"):
        command(monkeypatch, tmp_path, f"data.path={path}", f"custom_reward_function.path={grader}")
    shown = capsys.readouterr()
    assert "no response of" in shown.err
    assert "row 1, response 1" in shown.err
    assert "test_score" not in shown.out


# ---- the documentation ---------------------------------------------------------------------------


def test_the_example_of_the_documentation_prints_what_it_says(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    (_, maker), (_, reward), (_, commands), (_, output), (_, errors) = blocks
    for name, code in (("make_responses.py", maker), ("reward.py", reward)):
        assert name in text
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("make_responses.py")
    words = shlex.split(commands.replace("\\\n", " ").splitlines()[-1])
    assert words[:3] == ["python", "-m", "verl.trainer.main_eval"]
    command(monkeypatch, tmp_path, *words[3:])
    shown = capsys.readouterr()
    assert shown.out == output
    assert shown.err == errors
    assert json.loads((tmp_path / "result.json").read_text())["confidence"] == 0.95
