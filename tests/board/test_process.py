"""The process that writes: the trainer never waits for it, and hears when it cannot write."""

import os
import signal
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from tests.tiny_tokenizer import tiny_tokenizer
from verl.board import process
from verl.board.message import read_message, write_message
from verl.board.process import MAX_WAITING, StoreProcess
from verl.board.reader import StoreReader
from verl.board.recorder import Recorder
from verl.board.store import FILE_NAME, Sample
from verl.protocol import DataProto

PAD = 0


class OwnDecoding:
    """A tokenizer that no other process can be given."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join(f"<{token}>" for token in ids if token != PAD or not skip_special_tokens)


def recorder(folder, tokenizer=None, *, first_step=0):
    return Recorder(
        folder,
        tokenizer or tiny_tokenizer(),
        facts={"name": "run"},
        max_bytes=1 << 30,
        first_step=first_step,
    )


def batch():
    """Two rows: a prompt of two tokens and one of one, responses of three and of one."""
    tensors = {
        "prompts": torch.tensor([[3, 4], [PAD, 5]]),
        "responses": torch.tensor([[6, 7, 8], [9, PAD, PAD]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]]),
        "position_ids": torch.zeros(2, 5, dtype=torch.long),
        "response_mask": torch.tensor([[1, 0, 1], [1, 0, 0]]),
        "token_level_scores": torch.tensor([[0.0, 0.0, 0.1], [0.2, 0.0, 0.0]]),
        "advantages": torch.tensor([[0.5, 0.25, -1.0], [2.0, 0.0, 0.0]]),
        "policy_versions": torch.tensor([[3, 3, 4], [4, 0, 0]]),
    }
    objects = {
        "uid": np.array(["1-0", "1-1"], dtype=object),
        "data_source": np.array(["digits"] * 2, dtype=object),
        "reward_model": np.array([{"ground_truth": 4}, {"ground_truth": "\ud800"}], dtype=object),
        "__num_turns__": np.array([2, 1], dtype=np.int32),
        "acc": np.array([np.bool_(True), {"odd": 1}], dtype=object),
    }
    return DataProto.from_dict(
        tensors=tensors, non_tensors=objects, meta_info={"reward_extra_keys": ["acc"]}
    )


def test_a_message_comes_back_with_its_arrays():
    arrays = {
        "a": np.arange(5, dtype=np.float32)[::2],
        "none": np.empty(0, dtype=np.int32),
        "b": np.array([1, -2], dtype=np.int64),
    }
    content, found = read_message(write_message({"é": [None, 1.5, {"x": "\ud800"}]}, arrays))
    assert content == {"é": [None, 1.5, {"x": "?"}]}
    assert {name: values.dtype for name, values in found.items()} == {
        name: values.dtype for name, values in arrays.items()
    }
    for name, values in arrays.items():
        assert found[name].tolist() == values.tolist()


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), OwnDecoding()])
def test_a_batch_is_stored_row_by_row_with_its_texts(tmp_path, tokenizer, caplog):
    store = recorder(tmp_path, tokenizer)
    store.add_validation([Sample(phase="validation", uid="v", prompt="p", response="r")])
    metrics = {"a": np.float32(0.5), "b": float("nan"), "c": "text is left out"}
    store.add_step(1, metrics, {"gen": 1.0}, batch=batch(), warnings={"tripwire/x": "why"})
    store.close()
    warned = "OwnDecoding decodes in a way of its own" in caplog.text
    assert warned == isinstance(tokenizer, OwnDecoding)
    reader = StoreReader(tmp_path / FILE_NAME)
    (entry,) = reader.steps()
    assert entry["metrics"] == {"a": 0.5, "b": "nan"}
    assert reader.events()[0]["text"] == "tripwire/x: why"
    _, (first, second) = reader.recorded_batch(1)
    assert (first.uid, first.source, first.turns, first.truth) == ("1-0", "digits", 2, "4")
    assert (second.truth, second.extras) == ("?", {"acc": "{'odd': 1}"})
    assert first.extras == {"acc": True}
    assert (first.score, second.score) == tuple(
        batch().batch["token_level_scores"].sum(-1).tolist()
    )
    assert (first.prompt_ids, second.prompt_ids) == ([3, 4], [5])
    assert (first.response_ids, second.response_ids) == ([6, 7, 8], [9])
    columns = {name: values.tolist() for name, values in first.columns.items()}
    assert columns["mask"] == [1, 0, 1]
    assert columns["advantage"] == [0.5, 0.25, -1.0]
    assert columns["version"] == [3, 3, 4]
    assert second.columns["advantage"].tolist() == [2.0]
    shown = reader.sample(1)
    assert shown["advantage"] == -0.25, "the mean of the trained tokens"
    assert shown["prompt"] == tokenizer.decode([3, 4], skip_special_tokens=True)
    assert shown["response"] == tokenizer.decode([6, 7, 8], skip_special_tokens=True)
    assert shown["tokens"] == [[token, tokenizer.decode([token])] for token in (6, 7, 8)]
    assert reader.samples(phase="validation")["rows"][0]["response"] == "r"


def test_a_slow_disk_costs_samples_but_neither_metrics_nor_time(tmp_path):
    """The writer is stopped; the trainer is never held."""
    store = recorder(tmp_path)
    os.kill(store.process.pid, signal.SIGSTOP)
    for number in range(1, MAX_WAITING + 4):
        store.add_step(number, {"a": 1.0}, {}, batch=batch())
    os.kill(store.process.pid, signal.SIGCONT)
    store.close()
    reader = StoreReader(tmp_path / FILE_NAME)
    assert len(reader.steps()) == MAX_WAITING + 3
    assert reader.samples()["count"] == 2 * MAX_WAITING
    assert [event["step"] for event in reader.events()] == [65, 66, 67]
    assert "left out" in reader.events()[0]["kind"]


def test_what_waits_is_bounded_in_bytes_too(tmp_path):
    setup = {"folder": str(tmp_path), "facts": {}, "first_step": 0, "max_bytes": 1 << 30}
    store = StoreProcess(tmp_path / FILE_NAME, {**setup, "tokenizer": None}, max_waiting_bytes=1)
    assert not store.is_behind
    os.kill(store.pid, signal.SIGSTOP)
    store.add(1, {}, {"column.x": np.zeros(1)})
    assert store.is_behind
    store._process.kill()
    store.close()


def test_what_the_disk_refuses_ends_the_recording_and_not_the_run(tmp_path, caplog):
    store = recorder(tmp_path)
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("DROP TABLE steps")
    os.kill(store.process.pid, signal.SIGSTOP)
    for number in range(1, 5):
        store.add_step(number, {}, {}, batch=batch())
    os.kill(store.process.pid, signal.SIGCONT)
    wait_until_ended(store.process.pid)  # with messages that it has not read
    store.close()
    (record,) = caplog.records
    text = record.getMessage()
    assert "recording for the run page ends at step 1, training goes on" in text
    assert "OperationalError: no such table: steps" in text


def test_a_writer_that_was_killed_is_reported_once(tmp_path, caplog):
    store = recorder(tmp_path)
    store.add_step(1, {}, {}, batch=batch())
    deadline = time.monotonic() + 60
    while not StoreReader(store.path).steps():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(store.process.pid, signal.SIGKILL)
    for number in (2, 3):
        store.add_step(number, {}, {}, batch=batch())
    store.close()
    (record,) = caplog.records
    text = record.getMessage()
    assert "recording for the run page ends at step 2, training goes on" in text
    assert "ended by SIGKILL" in text
    assert [entry["step"] for entry in StoreReader(tmp_path / FILE_NAME).steps()] == [1]


def test_a_store_that_cannot_be_opened_is_reported(tmp_path, caplog):
    (tmp_path / FILE_NAME).write_text("not a database at all, but long enough to be one")
    store = recorder(tmp_path, first_step=6)
    assert not store.process.is_recording
    store.add_step(7, {}, {}, batch=batch())
    store.close()
    (record,) = caplog.records
    assert "ends at step 7, training goes on: DatabaseError: file is not a" in record.getMessage()


def test_what_was_handed_over_survives_kill_9_and_the_writer_ends(tmp_path):
    """Of the trainer, while the writer has not begun with any of it."""
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.board.test_process import batch, recorder\n"
        "store = recorder(Path(sys.argv[1]))\n"
        "os.kill(store.process.pid, signal.SIGSTOP)\n"
        "for number in (1, 2, 3):\n"
        "    store.add_step(number, {}, {}, batch=batch())\n"
        "print(store.process.pid, flush=True)\n"
        "os.kill(store.process.pid, signal.SIGCONT)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE,
        timeout=100,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    wait_until_ended(int(done.stdout))
    reader = StoreReader(tmp_path / FILE_NAME)
    assert [entry["step"] for entry in reader.steps()] == [1, 2, 3]
    assert reader.samples()["count"] == 6


def wait_until_ended(pid):
    deadline = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_writer_ends_though_a_fork_of_the_trainer_lives_on(tmp_path):
    """Something that was forked holds a copy of the socket, which has no end then."""
    program = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from tests.board.test_process import batch, recorder\n"
        "store = recorder(Path(sys.argv[1]))\n"
        "copy = os.dup(store.process._line.fileno())\n"
        "if os.fork() == 0:\n"
        "    for standard in range(3):\n"
        "        os.close(standard)\n"
        "    time.sleep(90)\n"
        "    os._exit(0)\n"
        "store.add_step(1, {}, {}, batch=batch())\n"
        "print(store.process.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE,
        timeout=100,
        check=True,
    )
    wait_until_ended(int(done.stdout))
    assert len(StoreReader(tmp_path / FILE_NAME).steps()) == 1


def test_the_writer_loads_neither_torch_nor_transformers():
    program = (
        "import sys, verl.board.writer\n"
        "sys.exit(sorted({'torch', 'transformers'} & set(sys.modules)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=100, check=False)
    assert done.returncode == 0


def test_what_waits_at_the_end_is_not_waited_for_without_end(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(process, "CLOSE_SECONDS", 0.2)
    store = recorder(tmp_path)
    os.kill(store.process.pid, signal.SIGSTOP)
    store.add_step(1, {}, {}, batch=batch())
    store.close()
    (record,) = caplog.records
    assert "ends at step 1, training goes on: still writing after 0.2 s" in record.getMessage()
    assert not is_running(store.process.pid)
