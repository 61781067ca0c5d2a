"""Saving in the background: nothing is lost, whether it ends well or not."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

from tests.chaos.shim import Control, environment, require_shim
from verl.utils.checkpoint import background as module
from verl.utils.checkpoint.background import (
    RECEIPT_BYTES,
    Background,
    Receipt,
    collect_receipts,
    upload_step,
)
from verl.utils.checkpoint.layout import TRACKER, CheckpointError, CheckpointUploadError


def test_a_second_job_waits_for_the_first():
    background, may_end, order = Background("test"), threading.Event(), []

    def first():
        assert may_end.wait(60)
        order.append("first")

    background.start(first)
    assert background.is_busy
    threading.Timer(0.1, may_end.set).start()
    background.start(lambda: order.append("second"))
    background.finish(60)
    assert order == ["first", "second"]
    assert not background.is_busy


def test_what_a_job_raises_is_raised_once_by_whoever_looks_next():
    background = Background("test")

    def fails():
        raise OSError(errno.ENOSPC, "full")

    for look in (background.check, background.finish, lambda: background.start(list)):
        background.start(fails)
        while background.is_busy:
            time.sleep(0.01)
        with pytest.raises(OSError, match="full"):
            look()
        background.check()
        background.finish(1)


def test_waiting_has_an_end():
    background, may_end = Background("test"), threading.Event()
    background.start(lambda: may_end.wait(60))
    with pytest.raises(TimeoutError, match=r"test has not ended within 0\.05 s"):
        background.finish(0.05)
    background.check()  # looking does not wait
    may_end.set()
    background.finish(60)


def test_receipts_are_collected_when_every_rank_has_written(tmp_path):
    receipts = [Receipt(tmp_path / "actor" / f"receipt.{rank}") for rank in range(2)]
    receipts[0].end()
    with pytest.raises(CheckpointError, match=r"1 of 2 ranks have not .*receipt\.1"):
        collect_receipts([receipt.path for receipt in receipts], 0.1)
    assert not receipts[0].path.exists()
    threading.Timer(0.1, receipts[1].end).start()
    collect_receipts([receipts[1].path], 10)
    assert list((tmp_path / "actor").iterdir()) == []


def test_a_rank_that_died_while_it_wrote_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.1)
    receipt = Receipt(tmp_path / "receipt")
    looks = []

    def check():
        looks.append(None)
        if len(looks) == 2:
            raise RuntimeError("rank 0 died")

    with pytest.raises(RuntimeError, match="rank 0 died"):
        collect_receipts([receipt.path], 3600, [check])
    assert len(looks) == 2


def test_what_a_rank_had_written_before_it_died_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.0)
    receipt = Receipt(tmp_path / "receipt")

    def check():
        receipt.end()
        raise RuntimeError("rank 0 died")

    collect_receipts([receipt.path], 3600, [check])
    assert list(tmp_path.iterdir()) == []


def test_of_many_ranks_that_have_not_written_four_are_named(tmp_path):
    paths = [Receipt(tmp_path / f"receipt.{rank}").path for rank in range(8)]
    with pytest.raises(CheckpointError, match="8 of 8 ranks have not") as caught:
        collect_receipts(paths, 0.0)
    assert [path for path in paths if str(path) in str(caught.value)] == paths[:4]


def test_what_the_disk_refused_a_rank_is_raised_as_it_was(tmp_path):
    receipt = Receipt(tmp_path / "receipt")
    receipt.end(OSError(errno.ENOSPC, "No space left on device", "/disk/model.safetensors"))
    assert receipt.path.stat().st_size == RECEIPT_BYTES  # no new space was needed to say so
    with pytest.raises(OSError, match="No space left") as caught:
        collect_receipts([receipt.path], 1)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/disk/model.safetensors")


RANK_ON_A_FULL_DISK = """
import sys
from pathlib import Path
from verl.utils.checkpoint.background import Receipt

receipt = Receipt(Path(sys.argv[1]))
print("begun", flush=True)
sys.stdin.readline()
receipt.end(OSError(28, "No space left on device") if sys.argv[2] == "refused" else None)
"""


@pytest.mark.parametrize("outcome", ["refused", "written"])
def test_a_disk_that_refuses_the_receipt_too_does_not_keep_the_owner_waiting(tmp_path, outcome):
    """A receipt is changed in place, which disks that copy on write refuse when they are full."""
    library, control = require_shim(tmp_path), Control(tmp_path / "control")
    path = tmp_path / "step" / "receipt"
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK_ON_A_FULL_DISK, str(path), outcome],
        env={**os.environ, **environment(library, path.parent, control=control)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with rank:
        assert rank.stdout.readline() == "begun\n"
        control.set(is_full=True)
        rank.stdin.write("end\n")
        rank.stdin.flush()
        with pytest.raises(OSError, match=r"refused .* its receipt too"):
            collect_receipts([path], 60)
        assert rank.wait(60) == 0


@pytest.mark.parametrize("error", [None, OSError(errno.ENOSPC, "No space left on device")])
def test_a_rank_may_end_after_its_owner_has_dropped_the_step(tmp_path, error):
    receipt = Receipt(tmp_path / "step" / "receipt")
    shutil.rmtree(tmp_path / "step")
    receipt.end(error)


def test_any_other_error_of_a_rank_is_told_in_words(tmp_path):
    receipt = Receipt(tmp_path / "receipt")
    receipt.end(ValueError("not plain data" * 1000))
    with pytest.raises(CheckpointError, match="ValueError: not plain data"):
        collect_receipts([receipt.path], 1)


def test_a_receipt_that_is_being_changed_is_not_read(tmp_path):
    receipt = Receipt(tmp_path / "receipt")
    receipt.path.write_bytes(b'{"state": "wri')
    threading.Timer(0.1, receipt.end).start()
    collect_receipts([receipt.path], 10)


def test_a_step_is_copied_with_the_tracker_last(tmp_path):
    step = tmp_path / "local" / "global_step_3"
    (step / "actor").mkdir(parents=True)
    (step / "actor" / "w").write_text("weights")
    (step.parent / TRACKER).write_text("3")
    for _ in range(2):  # a second copy replaces the first
        upload_step(step, f"{tmp_path}/remote/")
    assert (tmp_path / "remote" / "global_step_3" / "actor" / "w").read_text() == "weights"
    assert (tmp_path / "remote" / TRACKER).read_text() == "3"


def test_a_copy_that_fails_says_that_the_step_is_safe(tmp_path):
    (tmp_path / "remote").write_text("a file, not a folder")
    with pytest.raises(CheckpointUploadError, match=r"global_step_3 is committed, but"):
        upload_step(tmp_path / "global_step_3", str(tmp_path / "remote"))
