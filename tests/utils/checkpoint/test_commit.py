"""A step is there, whole and acknowledged, or not there at all."""

import copy
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.utils.checkpoint.layout import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointSaveError,
    NoIntactCheckpointError,
    Skipped,
    as_os_error,
    list_steps,
    saving_folder,
    step_of,
)
from verl.utils.checkpoint.manifest import in_threads, verify_step
from verl.utils.checkpoint.store import staged_step

TRACKER = "latest_checkpointed_iteration.txt"


def save(root, step, text="hello"):
    with staged_step(root, step, fingerprint={"run": {"name": "a"}}) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "notes.txt").write_text(text)


def test_a_committed_step_holds_its_files_a_manifest_and_the_tracker_names_it(tmp_path):
    root = tmp_path / "project" / "experiment"
    save(root, 7)
    assert {path.name for path in root.iterdir()} == {"global_step_7", TRACKER}
    assert (root / TRACKER).read_text() == "7"
    manifest = json.loads((root / "global_step_7" / "manifest.json").read_text())
    # sha256 of "hello"
    assert manifest["files"] == {
        "actor/notes.txt": {
            "size": 5,
            "sha256": "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824",
        }
    }
    assert manifest["format"] == "verl-checkpoint"
    assert manifest["version"] == 1
    assert manifest["step"] == 7
    assert manifest["fingerprint"] == {"run": {"name": "a"}}


def test_nothing_is_visible_under_its_name_before_the_commit(tmp_path):
    with staged_step(tmp_path, 3, fingerprint={}) as folder:
        (folder / "a").write_text("x")
        assert not (tmp_path / "global_step_3").exists()
        assert list_steps(tmp_path) == {}
    assert list_steps(tmp_path) == {3: tmp_path / "global_step_3"}


def fail_in_the_middle(root, error):
    with staged_step(root, 2, fingerprint={}) as folder:
        (folder / "a").write_text("x")
        raise error


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), SystemExit(1)])
def test_an_error_in_the_middle_leaves_the_earlier_step_and_nothing_else(tmp_path, error):
    save(tmp_path, 1)
    with pytest.raises(type(error)):
        fail_in_the_middle(tmp_path, error)
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_1", TRACKER}
    verify_step(tmp_path / "global_step_1", step=1)


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 1, "old")
    save(tmp_path, 1, "new")
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_1", TRACKER}
    verify_step(tmp_path / "global_step_1")
    assert (tmp_path / "global_step_1" / "actor" / "notes.txt").read_text() == "new"


def test_a_refusal_of_the_disk_names_the_file_the_reason_and_the_free_space(tmp_path):
    save(tmp_path, 1)
    with (
        pytest.raises(CheckpointSaveError) as caught,
        staged_step(tmp_path, 2, fingerprint={}) as folder,
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "actor.safetensors"))
    error = caught.value
    assert (error.step, error.errno) == (2, errno.ENOSPC)
    assert error.filename.endswith("actor.safetensors")
    assert error.free_bytes is not None
    assert error.free_bytes > 0
    assert "No space left on device (ENOSPC)" in str(error)
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_1", TRACKER}


def test_a_refusal_that_a_library_put_in_words_is_still_one():
    found = as_os_error(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert found is not None
    assert found.errno == errno.ENOSPC
    assert as_os_error(ValueError("28")) is None
    assert as_os_error(TimeoutError("worker 3 did not answer")) is None


def test_a_root_that_cannot_be_written_is_a_save_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(CheckpointSaveError, match="file"),
        staged_step(tmp_path / "file" / "root", 1, fingerprint={}),
    ):
        raise AssertionError("the block must not run")


def test_a_link_among_the_files_is_refused(tmp_path):
    with (
        pytest.raises(ValueError, match=r"out is not a plain file"),
        staged_step(tmp_path, 1, fingerprint={}) as folder,
    ):
        (folder / "out").symlink_to("/etc/hostname")
    assert list(tmp_path.iterdir()) == []


def test_a_negative_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match="step is -1"), staged_step(tmp_path, -1, fingerprint={}):
        raise AssertionError("the block must not run")


def test_the_next_save_removes_what_dead_runs_left_and_nothing_else(tmp_path):
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True, text=True, timeout=30, check=True,
    ).stdout.strip()  # fmt: skip
    host = saving_folder(tmp_path, 0).name.split("-")[1]
    leftovers = [
        f".global_step_2.saving-{host}-{dead}",
        f".global_step_2.saving-{host}-{os.getpid()}",
        ".global_step_3.saving-another_host-1",
        ".global_step_4.deleting",
    ]
    others = [
        f".global_step_5.saving-{host}-1",  # process 1 is alive: another run is saving right now
        ".global_step_x.saving",
        "global_step_9.bak",
        ".cache",
    ]
    for name in leftovers + others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    save(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_1", TRACKER, *others}


def test_a_step_that_a_killed_save_moved_aside_gets_its_name_back(tmp_path):
    save(tmp_path, 1, "old")
    os.rename(tmp_path / "global_step_1", tmp_path / ".global_step_1.displaced")
    assert list_steps(tmp_path) == {1: tmp_path / ".global_step_1.displaced"}
    save(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {
        "global_step_1",
        "global_step_2",
        TRACKER,
    }
    verify_step(tmp_path / "global_step_1", step=1)


@pytest.mark.parametrize(
    "error",
    [
        CheckpointSaveError(3, OSError(28, "full", "a"), Path("/r"), None),
        CheckpointCorruptError(Path("/r"), ["a is missing"]),
        NoIntactCheckpointError(Path("/r"), [Skipped(1, "a is missing")]),
        CheckpointMismatchError(Path("/r"), ["x was 1 and is 2"]),
    ],
)
def test_errors_survive_the_way_to_another_process(error):
    again = copy.copy(error)  # by the same protocol as pickling
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("num_bytes", [0, 1 << 30])
def test_results_keep_their_order_with_one_thread_or_several(num_bytes):
    assert in_threads(lambda number: number * 2, range(50), num_bytes) == list(range(0, 100, 2))


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("global_step_0", 0),
        ("global_step_12", 12),
        ("global_step_012", None),
        ("global_step_-1", None),
        ("global_step_", None),
        ("global_step_1.tmp", None),
        ("global_step_" + "9" * 30, None),
        ("global_step_٣", None),
        ("other", None),
    ],
)
def test_only_exact_names_are_steps(name, step):
    assert step_of(name) == step


def test_another_format_of_names_is_understood():
    assert step_of("step-5-x", "step-{}-x") == 5


def test_saving_needs_no_torch():
    """The part that commits and verifies is plain Python: cheap to start, easy to kill and test."""
    code = "import sys, verl.utils.checkpoint.store; print('torch' in sys.modules)"
    root = Path(__file__).parents[3]
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=60, check=True, cwd=root,
    )  # fmt: skip
    assert run.stdout.strip() == "False"
