"""A real run is recorded as it was trained, served while it goes on, and exported to one file."""

import json
import re
import socket
import urllib.error
import urllib.request
from itertools import pairwise
from pathlib import Path

import pytest

from tests.toy import make_toy, toy_run
from verl.board import __main__ as command
from verl.board.reader import StoreReader
from verl.board.serving import Board, board_server, page_address
from verl.board.store import FILE_NAME, Step, StoreWriter
from verl.diff import main as diff


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps with validation before, recorded; the folder of the run and its trainer."""
    folder = tmp_path_factory.mktemp("board")
    toy = make_toy(folder / "toy")
    changes = ["trainer.board=true", "trainer.val_before_train=true", "trainer.test_freq=2"]
    lines, trainer = toy_run(toy, folder / "first", *changes)
    toy_run(toy, folder / "second", *changes)
    return folder, lines, trainer


def test_the_store_holds_what_was_trained(run):
    folder, lines, trainer = run
    reader = StoreReader(folder / "first" / "checkpoints" / FILE_NAME)
    assert [entry["step"] for entry in reader.steps()] == [0, 1, 2]
    last = reader.steps()[-1]
    assert last["metrics"]["critic/score/mean"] == lines[-1]["critic/score/mean"]
    assert "update_actor" in last["seconds"]
    batch, rows = trainer.batch, list(reader.trained(2))
    assert len(rows) == len(batch)
    for row, entry in enumerate(rows):
        mask = batch.batch["attention_mask"][row, batch.batch["prompts"].shape[1] :].bool()
        assert [token for token, _ in entry["tokens"]] == batch.batch["responses"][row][
            mask
        ].tolist()
        advantages = batch.batch["advantages"][row][mask].tolist()
        assert entry["columns"]["advantage"] == pytest.approx(advantages, abs=1e-5)
        assert entry["columns"]["entropy"], "the pass for old log-probs computes it"
        assert entry["score"] == pytest.approx(batch.batch["token_level_scores"][row].sum().item())
    validation = reader.samples(phase="validation")
    assert validation["count"] == 6
    assert {row["step"] for row in validation["rows"]} == {0, 2}


def test_the_seconds_of_recorded_steps_are_complete(run):
    folder, _, _ = run
    entries = StoreReader(folder / "first" / "checkpoints" / FILE_NAME).steps()
    for before, entry in pairwise(entries):
        wall = entry["time"] - before["time"]
        assert sum(entry["seconds"].values()) == pytest.approx(wall, rel=0.01, abs=0.01)


def ask(server, question, body, token=None):
    request = urllib.request.Request(
        f"{server.url}/api/{question}",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {server.token if token is None else token}"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def refused_with(server, question, body, token=None):
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(server, question, body, token)
    with refused.value as error:
        return error.code


def test_the_server_answers_the_page_and_nobody_without_the_token(run):
    folder, _, _ = run
    with board_server(Board([folder])) as server:
        address = page_address(server)
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{server.url}/", timeout=60) as reply:
            text = reply.read().decode()
            assert "connect-src" in reply.headers["Content-Security-Policy"]
        assert text.startswith("<!doctype html>")
        assert server.token not in text
        names = [one["name"] for one in ask(server, "runs", {})]
        assert names == ["verl/first", "verl/second"]
        found = ask(server, "samples", {"run": 0, "limit": 3})
        assert len(found["rows"]) == 3
        assert ask(server, "sample", {"run": 0, "id": found["rows"][0]["id"]})["tokens"]
        assert ask(server, "compare", {"first": 0, "second": 1}) is None
        for question, body, status in (
            ("samples", {"run": 9}, 400),
            ("samples", {"run": 0, "sort": "loudest"}, 400),
            ("sample", {"run": 0, "id": 10**6}, 404),
        ):
            assert refused_with(server, question, body) == status
        assert refused_with(server, "runs", {}, token="x" * 32) == 401


def test_a_change_is_told_when_a_step_is_committed(tmp_path):
    """By server-sent events, to who has the token."""
    store = StoreWriter(tmp_path, facts={"name": "a"}, decode=str, max_bytes=1 << 20)
    board = Board([tmp_path])
    with board_server(board) as server:
        assert refused_with(server, "changes", {}, token="x" * 32) == 401
        request = urllib.request.Request(
            f"{server.url}/api/changes",
            data=b"{}",
            headers={"Authorization": f"Bearer {server.token}"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert reply.headers["Content-Type"] == "text/event-stream"
            assert reply.readline() == b'data: {"last": [null]}\n'
            store.add(Step(number=4, metrics={}, seconds={}))
            lines = iter(reply.readline, b"")
            assert next(line for line in lines if line.startswith(b"data")) == (
                b'data: {"last": [4]}\n'
            )
            board.close()
    store.close()


def test_an_export_is_one_file_with_its_data(run, tmp_path, capsys):
    folder, _, _ = run
    assert command.main([str(folder), "--export", str(tmp_path / "runs.html")]) == 0
    assert "wrote" in capsys.readouterr().out
    text = (tmp_path / "runs.html").read_text()
    (inside,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    data = json.loads(inside)
    assert [len(samples) for samples in data["samples"]] == [38, 38]
    assert data["differences"] == {"0-1": None}
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")


def test_an_export_makes_its_folder_or_says_why_it_cannot(run, tmp_path, capsys):
    folder, _, _ = run
    wanted = tmp_path / "pages" / "runs.html"
    assert command.main([str(folder), "--samples=1", "--export", str(wanted)]) == 0
    assert wanted.is_file()
    beyond = wanted / "runs.html"
    assert command.main([str(folder), "--samples=1", "--export", str(beyond)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --export {beyond} cannot be written")
    assert "name another file" in said


def test_a_port_that_is_taken_or_is_none_is_refused_with_the_way_out(run, capsys):
    folder, _, _ = run
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command.main([str(folder), f"--port={port}"]) == 2
    assert command.main([str(folder), "--port=70000"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert f"--port {port} cannot be used" in first
    assert "0 takes a free one" in first
    assert "--port 70000 cannot be used" in second


def test_equal_runs_are_equal_and_a_missing_one_is_named(run, tmp_path, capsys):
    folder, _, _ = run
    assert diff([str(folder / "first"), str(folder / "second")]) == 0
    assert "equal in all 3 steps" in capsys.readouterr().out
    assert diff([str(folder / "first"), str(tmp_path)]) == 2
    assert "trainer.board=True" in capsys.readouterr().err
    assert diff([str(folder), str(folder)]) == 2
    assert "holds 2 runs" in capsys.readouterr().err
    assert command.main([str(tmp_path)]) == 2


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path, monkeypatch):
    for place, name in (("a/grpo", "demo"), ("b/grpo", "demo"), ("c", "other")):
        StoreWriter(tmp_path / place, facts={"name": name}, decode=str, max_bytes=1 << 20).close()
    monkeypatch.chdir(tmp_path)
    paths = [Path("a"), tmp_path / "b", tmp_path / "c"]
    names = [run["name"] for run in Board(paths).runs({})]
    assert names == ["demo (a/grpo)", "demo (b/grpo)", "other"]


def test_a_store_that_cannot_be_read_is_left_out_and_named(tmp_path, capsys):
    StoreWriter(tmp_path / "good", facts={"name": "good"}, decode=str, max_bytes=1 << 20).close()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / FILE_NAME).write_text("not a database, but long enough to be one")
    assert [run["name"] for run in Board([tmp_path]).runs({})] == ["good"]
    assert command.main([str(tmp_path), "--export", str(tmp_path / "page.html")]) == 0
    assert "note: left out: " in capsys.readouterr().err
    assert command.main([str(tmp_path / "bad")]) == 2
    assert "cannot be read as the store of a run" in capsys.readouterr().err


def test_no_text_in_an_export_begins_a_tag_or_a_comment(monkeypatch):
    """Within a script `<!--<script>` would swallow its end, and the page with it."""
    board = Board([])
    monkeypatch.setattr(board, "metrics", lambda _: ["<!--<script>", "</script><img>"])
    (inside,) = re.findall(r'type="application/json">(.*?)</script>', board.exported(1), re.S)
    assert "<" not in inside
    assert json.loads(inside)["metrics"] == ["<!--<script>", "</script><img>"]
