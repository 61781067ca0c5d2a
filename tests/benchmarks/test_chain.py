import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import all as chain_command
from benchmarks.gpu.all import Chain
from benchmarks.gpu.plan import (
    PLAN,
    TINY_PLAN,
    USUAL,
    Part,
    beside_each_other,
    expected_seconds,
)
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer
from verl.utils.dataset.prompts import CHATML

SECONDS_OF_A_CALL, FILES_OF_A_CALL = 570, 8
NOTE_TIMES = """
import argparse, json, pathlib, time
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path)
parser.add_argument("--seconds", type=float, default=0.0)
options = parser.parse_args()
start = time.monotonic()
time.sleep(options.seconds)
options.out.write_text(json.dumps({"times": [start, time.monotonic()]}))
"""


def read(folder, claim):
    return json.loads((folder / f"{claim}.json").read_text())["runs"]


@pytest.fixture
def chain(tmp_path):
    return Chain(tmp_path, seconds=60, trl=tmp_path)


def test_a_part_that_fails_is_reported_with_its_last_words(chain, tmp_path):
    chain.run(Part("a", "decode", "no_such_part", "--shape tiny", seconds=1))
    (run,) = read(tmp_path, "decode")
    assert run["status"] == "failed"
    assert "No module named benchmarks.gpu.no_such_part" in run["reason"]
    assert chain.failures() == ["decode --shape tiny"]


def test_a_part_without_time_is_left_out(chain, tmp_path):
    chain.run(Part("a", "decode", "decode", "--shape 0.5B", seconds=61))
    (run,) = read(tmp_path, "decode")
    assert run["status"] == "left out"
    assert chain.failures() == []


def test_without_time_for_it_what_was_measured_before_stays(chain, tmp_path):
    part = Part("a", "decode", "decode", "--shape 0.5B", seconds=61)
    chain.keep(part, {"status": "done", "seconds": [1.0]})
    again = Chain(tmp_path, seconds=60, trl=tmp_path, adds=True)
    again.run(part)
    again.run(Part("a", "decode", "decode", "--shape 7B", seconds=61))
    assert [run["status"] for run in read(tmp_path, "decode")] == ["done", "left out"]


def test_the_chain_goes_on_after_a_failure_and_ends_with_1(tmp_path, monkeypatch, capsys):
    parts = [Part(letter, claim, "no_such_part", "", 1) for letter, claim in ("ax", "by", "cz")]
    monkeypatch.setattr(chain_command, "PLAN", parts)
    assert chain_command.main(["--out", str(tmp_path), "--only", "a,c"]) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"x.json", "z.json"}
    assert "2 parts, about 2 s in all" in capsys.readouterr().out


def test_what_is_measured_anew_takes_the_place_of_what_was_there_before(tmp_path):
    lines = [("--shape 0.5B", ""), ("--shape 0.5B", "grows"), ("--shape 3B", "")]
    for adds, reason in (False, "first"), (True, "second"):
        chain = Chain(tmp_path, seconds=60, trl=tmp_path, adds=adds)
        for arguments, allocator in lines if not adds else lines[1:2]:
            part = Part("d", "trl_step", "trl_step", arguments, 1, allocator=allocator)
            chain.keep(part, {"status": "left out", "reason": reason, "samples": [1]})
    found = [
        (run["arguments"], run["allocator"], run["reason"]) for run in read(tmp_path, "trl_step")
    ]
    assert found == [
        ("--shape 0.5B", "", "first"),
        ("--shape 3B", "", "first"),
        ("--shape 0.5B", "grows", "second"),
    ]


def test_what_takes_longer_than_ten_minutes_is_left_for_those_who_ask():
    usual = [part for part in PLAN if part.letter in USUAL.split(",")]
    assert expected_seconds(usual) <= 590
    others = {part.letter for part in PLAN} - {part.letter for part in usual}
    assert others == {"g", "i", "j", "l", "m", "n"}


def test_each_part_fits_ten_minutes_and_what_can_be_carried_home():
    assert max(part.seconds for part in PLAN) <= SECONDS_OF_A_CALL
    assert len({part.claim for part in PLAN if part.letter in USUAL.split(",")}) <= FILES_OF_A_CALL


def test_every_part_can_be_tried_on_a_cpu_and_names_a_page():
    tried = {(part.claim, part.module) for part in TINY_PLAN}
    model_of_the_pieces = ("gsm8k", "examples/smollm2/prepare.py")
    assert {(part.claim, part.module) for part in PLAN} - tried == {model_of_the_pieces}
    for part in PLAN:
        page = part.page.partition(",")[0]
        assert page.startswith("none: ") or (chain_command.ROOT / page.split()[0]).is_file(), page


def test_timed_parts_run_alone_and_lanes_between_them_beside_each_other():
    def part(seconds, lane=""):
        return Part("x", "y", "z", "", seconds, lane=lane)

    a, b = part(1), part(2)
    first, second, other, late = part(3, "p"), part(4, "p"), part(6, "q"), part(8, "q")
    plan = [a, b, first, other, second, a, late]
    assert list(beside_each_other(plan)) == [
        *([[a]], [[b]], [[first, second], [other]]),
        *([[a]], [[late]]),
    ]
    assert expected_seconds(plan) == 1 + 2 + 7 + 1 + 8


def test_lanes_overlap_and_their_parts_follow_each_other(chain, tmp_path):
    script = tmp_path / "note.py"
    script.write_text(NOTE_TIMES)
    lanes = [("a", "p"), ("b", "p"), ("c", "q")]
    parts = [
        Part("x", name, str(script), "--out {out} --seconds 0.7", 5, lane=lane)
        for name, lane in lanes
    ]
    chain.run_all(parts)
    times = {name: read(tmp_path, name)[0]["times"] for name, _ in lanes}
    assert times["a"][1] <= times["b"][0]
    assert max(times["a"][0], times["c"][0]) < min(times["a"][1], times["c"][1])


def test_a_part_that_does_not_end_is_ended_with_all_that_it_started(chain, tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(
        "import subprocess, sys, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    found = chain.child(Part("x", "y", str(script), "{work}/pid", 1, result=""), limit=3)
    assert found["status"] == "failed"
    assert found["reason"].endswith("not done after 3 s")
    deadline = time.monotonic() + 20
    child = Path("/proc") / (tmp_path / "pid").read_text()
    while child.exists() and "State:\tZ" not in (child / "status").read_text():
        assert time.monotonic() < deadline, "the child still runs"
        time.sleep(0.05)


def test_what_needs_a_file_that_is_not_there_is_left_out_and_says_which(chain, tmp_path):
    chain.run(Part("2", "gsm8k", "gsm8k", "", 1, needs=("{work}/smollm2.0",)))
    (run,) = read(tmp_path, "gsm8k")
    assert run["status"] == "left out"
    assert run["reason"] == f"needs {tmp_path}/smollm2.0"


def test_what_is_done_is_not_run_again_unless_it_is_named(tmp_path, monkeypatch, capsys):
    script = tmp_path / "part.py"
    script.write_text(NOTE_TIMES)
    parts = [Part("a", name, str(script), "--out {out}", 5) for name in ("one", "two")]
    monkeypatch.setattr(chain_command, "PLAN", parts)
    out = tmp_path / "out"
    common = ["--out", str(out), "--add"]
    assert chain_command.main([*common, "--only", "one"]) == 0
    first = read(out, "one")
    assert chain_command.main(common) == 0
    assert "1 parts, about 5 s in all" in capsys.readouterr().out
    assert read(out, "one") == first
    assert chain_command.main([*common, "--only", "one"]) == 0
    assert read(out, "one") != first


def test_results_of_several_machines_come_together(tmp_path, monkeypatch, capsys):
    parts = [Part(letter, "gsm8k", "gsm8k", f"--only {letter}", 5) for letter in "123"]
    monkeypatch.setattr(chain_command, "PLAN", parts)
    states = {"a": ["done", "failed"], "b": ["failed", "done"]}
    for name, (one, two) in states.items():
        chain = Chain((tmp_path / name), seconds=1, trl=tmp_path)
        chain.out.mkdir()
        chain.keep(parts[0], {"status": one, "wall_seconds": 3.0, "reason": f"in {name}"})
        chain.keep(parts[1], {"status": two, "wall_seconds": 4.0, "reason": f"in {name}"})
    folders = [str(tmp_path / name) for name in states]
    out = tmp_path / "out"
    assert chain_command.main(["--out", str(out), "--take", *folders]) == 0
    assert [(run["status"], run["reason"]) for run in read(out, "gsm8k")] == [
        ("done", "in a"),
        ("done", "in b"),
    ]
    text = capsys.readouterr().out
    assert "| 1 | `gsm8k: gsm8k --only 1` | **done** in 3 s: in a | docs/performance.md |" in text
    assert "| 3 | `gsm8k: gsm8k --only 3` | not run | docs/performance.md |" in text


def test_the_packages_of_trl_are_for_its_part_only(chain, tmp_path):
    by_part = {part.module: chain.environment(part).get("PYTHONPATH", "") for part in PLAN}
    assert by_part.pop("trl_step").startswith(str(tmp_path))
    assert not any(str(tmp_path) in path for path in by_part.values())


@pytest.mark.slow
@pytest.mark.timeout(1800)  # nine processes, each of which imports torch
def test_the_whole_chain_runs_on_a_cpu(tmp_path, capsys):
    options = ["--out", str(tmp_path), "--tiny", "--seconds", "1800"]
    assert chain_command.main([*options, "--only", "a,b,c,e,f,h,k"]) == 0
    text = capsys.readouterr().out
    for title in (
        "Generation",
        "Beside transformers",
        "Training",
        "Where a training step's time goes",
        "GRPO step:",
        "Equal bits",
        "Generation with",
    ):
        assert f"**{title}" in text


def small_home(folder: Path) -> None:
    """A tiny model and a few problems where the plan looks for the real ones."""
    model = folder / "models" / "SmolLM2-135M-Instruct"
    tiny_model("llama").save_pretrained(model)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(model)
    raw = folder / "raw"
    raw.mkdir()
    for name, first in (("train", 0), ("test", 50)):
        rows = [
            {"question": f"What is {n}+1?", "answer": f"{n}+1={n + 1}\n#### {n + 1}"}
            for n in range(first, first + 16)
        ]
        (raw / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    script = str(chain_command.ROOT / "examples/data_preprocess/gsm8k.py")
    command = [sys.executable, script, "--local_dataset_path", str(raw)]
    command += ["--local_save_dir", str(folder / "data/gsm8k")]
    subprocess.run(command, check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_is_asked_for_runs_on_a_cpu(tmp_path, capsys):
    small_home(tmp_path / "work" / "home")
    options = ["--tiny", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    status = chain_command.main([*options, "--only", "g,agents,fp8,tests", "--seconds", "1800"])
    text = capsys.readouterr().out
    assert status == 0, text
    lines = [line for line in text.splitlines() if line.startswith(("| g", "| n"))]
    assert len(lines) == 5
    assert [line for line in lines if "**done**" not in line] == []
