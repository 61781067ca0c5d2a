import json

import pytest

from benchmarks.gpu import all as chain_command
from benchmarks.gpu.all import PLAN, USUAL, Chain, Part


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


def test_what_takes_longer_than_ten_minutes_is_left_for_those_who_ask(tmp_path):
    usual = [part for part in PLAN if part.letter in USUAL.split(",")]
    assert sum(part.seconds for part in usual) <= 590
    assert {part.letter for part in PLAN} - {part.letter for part in usual} == {"i", "j", "l"}


def test_the_packages_of_trl_are_for_its_part_only(chain, tmp_path):
    by_part = {part.module: chain.environment(part).get("PYTHONPATH", "") for part in PLAN}
    assert by_part.pop("trl_step").startswith(str(tmp_path))
    assert not any(str(tmp_path) in path for path in by_part.values())


def test_no_more_files_come_out_than_can_be_carried_home():
    assert len({part.claim for part in PLAN}) <= 8


@pytest.mark.slow
@pytest.mark.timeout(540)  # nine processes, each of which imports torch
def test_the_whole_chain_runs_on_a_cpu(tmp_path, capsys):
    assert chain_command.main(["--out", str(tmp_path), "--tiny", "--only", "a,b,c,e,f,g,h,k"]) == 0
    text = capsys.readouterr().out
    for title in (
        "Generation",
        "Beside transformers",
        "Training",
        "Where a training step's time goes",
        "GRPO step:",
        "GRPO step with heavy-tailed",
        "Equal bits",
        "Generation with",
    ):
        assert f"**{title}" in text
