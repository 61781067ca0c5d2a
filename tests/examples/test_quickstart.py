"""The pieces of the quickstart, and a miniature of the whole."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.quickstart import make_data
from examples.quickstart.build_model import build, build_tokenizer
from examples.quickstart.make_data import blurted, question, worked_out
from examples.quickstart.plot import bar, text_chart
from examples.quickstart.reward import compute_score

FOLDER = Path(make_data.__file__).parent


def test_problems_are_worked_out_column_by_column():
    assert worked_out((5071, 4)).splitlines() == [
        "1*4+0=04",
        "7*4+0=28",
        "0*4+2=02",
        "5*4+0=20",
        "#### 20284",
    ]
    assert question((5071, 4)) == "5071*4"
    assert blurted((5071, 4)) == "#### 20284"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_data.make(folder, seed=3)
    return {file.stem: parquet.read_table(file).to_pylist() for file in folder.iterdir()}


def test_every_demonstration_is_right_and_every_answer_can_be_rewarded(data):
    for name in ("sft_worked_out", "sft_mixed", "sft_test"):
        for row in data[name]:
            number, factor = map(int, row["prompt"].split("*"))
            result = compute_score("", row["response"], str(number * factor))
            assert result["score"] == 1.0, row
    for row in data["train"] + data["test"]:
        number, factor = map(int, row["prompt"][0]["content"].split("*"))
        assert row["reward_model"]["ground_truth"] == str(number * factor)
        assert 10000 <= number * factor < 100000


def test_held_out_problems_occur_nowhere_else(data):
    held_out = {row["prompt"][0]["content"] for row in data["test"]}
    seen = {row["prompt"] for row in data["sft_worked_out"] + data["sft_mixed"]}
    seen |= {row["prompt"][0]["content"] for row in data["train"]}
    assert len(held_out) == 256
    assert not held_out & seen


def test_first_all_is_worked_out_then_two_in_three_are_blurted(data):
    assert all("=" in row["response"] for row in data["sft_worked_out"])
    rows = data["sft_mixed"]
    assert sum("=" not in row["response"] for row in rows) / len(rows) == pytest.approx(0.65)


def test_the_reward_looks_at_the_last_answer_only():
    assert compute_score("", "#### 12", "12") == {"score": 1.0, "worked_out": 0.0}
    assert compute_score("", "1*4+0=04\n#### 13", "12") == {"score": 0.0, "worked_out": 1.0}
    assert compute_score("", "#### 12\n#### 13", "12")["score"] == 0.0
    assert compute_score("", "12", "12")["score"] == 0.0
    assert compute_score("", "#### 123", "12")["score"] == 0.0


def test_the_saved_model_and_its_tokenizer_come_back(tmp_path):
    assert build(tmp_path, seed=0) == 669_568
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.vocab_size == len(tokenizer) == 260
    text = worked_out((5071, 4)) + " é ✓"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    asked = [{"role": "user", "content": "5071*4"}]
    templated = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert templated == "<|user|>5071*4<|assistant|>"
    ids = tokenizer(templated, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids[:1] + ids[-1:]) == ["<|user|>", "<|assistant|>"]
    assert ids == build_tokenizer()(templated, add_special_tokens=False)["input_ids"]


def test_bars_are_as_long_as_the_accuracy():
    assert bar(0.0, 4) == "····"
    assert bar(0.5, 4) == "██··"
    assert bar(1.0, 4) == "████"
    assert bar(0.125, 4) == "▌···"
    results = {
        "validation": [{"step": 0, "accuracy": 0.25, "worked_out": 0.5}],
        "training": [{"step": 1, "response_length": 20.4}],
    }
    assert text_chart(results, width=4).splitlines()[1].split() == ["0", "█···", "25%", "50%", "20"]


def test_a_folder_that_is_no_earlier_run_is_not_deleted(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "is not an earlier run" in done.stderr
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_quickstart_that_is_ended_takes_its_command_along(tmp_path, number):
    command = [sys.executable, str(FOLDER / "run.py"), "--out", str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as started:
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
        while not children.read_text():
            assert started.poll() is None
        child = os.pidfd_open(int(children.read_text().split()[0]))
        started.send_signal(number)
        started.wait(60)
    assert select.select([child], [], [], 60)[0], "its command still runs"
    os.close(child)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_miniature_of_the_whole_runs_to_its_report(tmp_path):
    command = [sys.executable, str(FOLDER / "run.py"), "--out", str(tmp_path / "run")]
    sizes = [
        "--sft-steps",
        "20",
        "--habit-steps",
        "5",
        "--grpo-steps",
        "2",
        "--prompts-per-step",
        "4",
    ]
    done = subprocess.run(
        [*command, *sizes],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "$ python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo" in done.stdout
    assert "held-out accuracy" in done.stdout.splitlines()[-7]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [entry["step"] for entry in results["training"]] == [1, 2]
    assert [entry["step"] for entry in results["validation"]] == [0, 2]
    model = done.stdout.partition("model     ")[2].splitlines()[0]
    AutoModelForCausalLM.from_pretrained(tmp_path / model)
    chat, page = done.stdout.splitlines()[-2:]
    assert chat.startswith(f"chat      verl serve actor_rollout_ref.model.path={model} ")
    assert page.startswith("run page  file:///")
