"""One run keeps its checkpoints whole: committed, found, passed over and deleted by rule."""

import copy
import errno
import fcntl
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from verl.utils.checkpoint import layout
from verl.utils.checkpoint.layout import (
    LOCK,
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointSaveError,
    CheckpointUploadError,
    FolderInUse,
    NoIntactCheckpointError,
    Skipped,
    as_os_error,
    holding,
    list_steps,
    note_phase,
    saving_folder,
    step_of,
)
from verl.utils.checkpoint.manifest import in_threads, open_plain_file, verify_step
from verl.utils.checkpoint.store import CheckpointStore, find_intact, staged_step, steps_to_keep
from verl.utils.environment import Misuse

PRINT = {"config": {"algorithm.gamma": 1.0}}


def store(root, num_to_keep=None, **changes):
    return CheckpointStore(root, fingerprint={**PRINT, **changes}, num_to_keep=num_to_keep)


def save(run, *steps):
    for step in steps:
        with run.saving(step) as folder:
            (folder / "state.txt").write_text(f"step {step}")


def test_all_steps_are_kept_without_a_limit(tmp_path):
    save(store(tmp_path), 1, 2, 3)
    assert list(list_steps(tmp_path)) == [1, 2, 3]


@pytest.mark.parametrize(("limit", "kept"), [(1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_the_newest_steps_are_kept(tmp_path, limit, kept):
    save(store(tmp_path, limit), 1, 2, 3, 4)
    assert list(list_steps(tmp_path)) == kept


def test_every_file_and_folder_reaches_the_disk_before_a_step_has_its_name(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def noted(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path.name, (tmp_path / "global_step_1").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with store(tmp_path).saving(1) as folder:
        (folder / "part").mkdir()
        (folder / "part" / "state.txt").write_text("step 1")
        staging = folder.name
    before = {name for name, has_name in synced if not has_name}
    assert {"state.txt", "part", "manifest.json", staging} <= before


def test_the_old_step_is_there_until_the_new_one_is_committed(tmp_path):
    run = store(tmp_path, 1)
    save(run, 1)
    with run.saving(2) as folder:
        (folder / "a").write_text("x")
        assert list(list_steps(tmp_path)) == [1]
    assert list(list_steps(tmp_path)) == [2]


def test_a_failed_save_deletes_nothing(tmp_path):
    run = store(tmp_path, 1)
    save(run, 1)
    with pytest.raises(CheckpointSaveError), run.saving(2):
        raise OSError(28, os.strerror(28))
    assert list(list_steps(tmp_path)) == [1]
    save(run, 3)
    assert list(list_steps(tmp_path)) == [3]


def test_nothing_is_deleted_while_the_newest_step_is_not_intact(tmp_path):
    run = store(tmp_path)
    save(run, 1, 2)
    (tmp_path / "global_step_2" / "state.txt").unlink()
    run.num_to_keep = 1
    run._prune()
    assert list(list_steps(tmp_path)) == [1, 2]


def test_a_resumed_run_counts_the_steps_it_continues(tmp_path):
    save(store(tmp_path, 2), 1, 2)
    run = store(tmp_path, 2)
    assert run.resume().step == 2
    save(run, 3)
    assert list(list_steps(tmp_path)) == [2, 3]


def test_a_run_from_scratch_leaves_the_checkpoints_of_another_alone(tmp_path):
    save(store(tmp_path), 10, 20)
    save(store(tmp_path, 1), 1, 2)
    assert list(list_steps(tmp_path)) == [2, 10, 20]
    assert store(tmp_path).resume().step == 2  # the last one committed, not the highest number


def test_another_run_is_refused_with_what_differs(tmp_path):
    save(store(tmp_path), 1)
    other = store(tmp_path, config={"algorithm.gamma": 0.9})
    with pytest.raises(CheckpointMismatchError, match=r"algorithm\.gamma was 1\.0 and is 0\.9"):
        other.resume()


def test_a_path_given_by_the_user_is_verified_and_compared_too(tmp_path):
    save(store(tmp_path), 1, 2)
    run = store(tmp_path)
    assert run.resume(tmp_path / "global_step_1").step == 1
    with pytest.raises(CheckpointMismatchError):
        store(tmp_path, model={"w": "float32[2]"}).resume(tmp_path / "global_step_1")
    (tmp_path / "global_step_1" / "state.txt").write_text("step X")
    with pytest.raises(CheckpointCorruptError, match=r"state\.txt was changed"):
        run.resume(tmp_path / "global_step_1")
    with pytest.raises(ValueError, match="must end in global_step_N"):
        run.resume(tmp_path)


def test_roles_together_keep_as_many_steps_as_the_one_that_wants_most():
    assert steps_to_keep([2, 5]) == 5
    assert steps_to_keep([1]) == 1
    assert steps_to_keep([1, None]) is None
    assert steps_to_keep([]) is None


def test_keeping_no_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match="num_to_keep is 0"):
        store(tmp_path, 0)


TRACKER = "latest_checkpointed_iteration.txt"


def save_commit(root, step, text="hello"):
    with staged_step(root, step, fingerprint={"run": {"name": "a"}}) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "notes.txt").write_text(text)


def test_a_committed_step_holds_its_files_a_manifest_and_the_tracker_names_it(tmp_path):
    root = tmp_path / "project" / "experiment"
    save_commit(root, 7)
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
    save_commit(tmp_path, 1)
    with pytest.raises(type(error)):
        fail_in_the_middle(tmp_path, error)
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_1", TRACKER}
    verify_step(tmp_path / "global_step_1", step=1)


def test_saving_a_step_again_replaces_it(tmp_path):
    save_commit(tmp_path, 1, "old")
    save_commit(tmp_path, 1, "new")
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_1", TRACKER}
    verify_step(tmp_path / "global_step_1")
    assert (tmp_path / "global_step_1" / "actor" / "notes.txt").read_text() == "new"


def test_a_refusal_of_the_disk_names_the_file_the_reason_and_the_free_space(tmp_path):
    save_commit(tmp_path, 1)
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


def test_what_is_not_a_plain_file_is_closed_again(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="not a plain file") as caught:
        open_plain_file(tmp_path / "pipe")
    assert os.listdir("/proc/self/fd") == before, caught  # which holds the frame of the file


def test_a_negative_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match="step is -1"), staged_step(tmp_path, -1, fingerprint={}):
        raise AssertionError("the block must not run")


def test_the_next_save_removes_what_dead_runs_left_and_nothing_else(tmp_path):
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True, text=True, timeout=60, check=True,
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
    save_commit(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_1", TRACKER, *others}


def test_a_step_that_a_killed_save_moved_aside_gets_its_name_back(tmp_path):
    save_commit(tmp_path, 1, "old")
    os.rename(tmp_path / "global_step_1", tmp_path / ".global_step_1.displaced")
    assert list_steps(tmp_path) == {1: tmp_path / ".global_step_1.displaced"}
    save_commit(tmp_path, 2)
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
        CheckpointUploadError(Path("/r"), "hdfs://there", "no route"),
    ],
)
def test_errors_survive_the_way_to_another_process(error):
    if not isinstance(error, CheckpointSaveError):
        assert Path("/r") in vars(error).values()  # where it happened
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


def save_discover(root, *steps):
    for step in steps:
        with staged_step(root, step, fingerprint={}) as folder:
            (folder / "state.txt").write_text(f"step {step}")


def damage(root, step):
    (root / f"global_step_{step}" / "state.txt").write_text(f"STEP {step}")


def test_an_empty_or_missing_root_is_a_new_run(tmp_path):
    assert find_intact(tmp_path) is None
    assert find_intact(tmp_path / "nowhere") is None


def test_the_newest_step_is_found_by_number_not_by_name(tmp_path):
    save_discover(tmp_path, 8, 9, 10)
    found = find_intact(tmp_path)
    assert (found.step, found.path, found.skipped) == (10, tmp_path / "global_step_10", [])
    (tmp_path / TRACKER).unlink()
    assert find_intact(tmp_path).step == 10


def test_a_damaged_step_is_passed_over_with_the_reason(tmp_path, caplog):
    save_discover(tmp_path, 1, 2, 3)
    damage(tmp_path, 3)
    (tmp_path / "global_step_2" / "state.txt").unlink()
    with caplog.at_level(logging.WARNING):
        found = find_intact(tmp_path)
    assert found.step == 1
    assert found.skipped == [
        (3, "state.txt was changed: its hash is not the manifest's"),
        (2, "state.txt is missing"),
    ]
    assert "passing over step 3: state.txt was changed" in caplog.text
    assert "passing over step 2: state.txt is missing" in caplog.text


def test_a_root_without_any_intact_step_is_an_error_that_lists_them(tmp_path):
    save_discover(tmp_path, 1, 2)
    damage(tmp_path, 1)
    damage(tmp_path, 2)
    with pytest.raises(NoIntactCheckpointError, match=r"step 2: state\.txt was changed") as caught:
        find_intact(tmp_path)
    assert [step for step, _ in caught.value.skipped] == [2, 1]
    assert "trainer.resume_mode=disable" in str(caught.value)


def test_a_tracker_alone_proves_that_there_was_a_run(tmp_path):
    (tmp_path / TRACKER).write_text("40")
    with pytest.raises(NoIntactCheckpointError, match=r"step 40: .* its folder is missing"):
        find_intact(tmp_path)


def test_a_tracker_that_names_a_missing_step_falls_back(tmp_path):
    save_discover(tmp_path, 1, 2)
    (tmp_path / TRACKER).write_text("99\n")
    found = find_intact(tmp_path)
    assert found.step == 2
    assert found.skipped == [(99, f"{TRACKER} names it, but its folder is missing")]


@pytest.mark.parametrize("text", ["", "latest", "-1", "1.5", "٣", "9" * 40, "\0\0"])
def test_a_tracker_without_a_number_is_reported_and_the_newest_step_serves(tmp_path, text):
    save_discover(tmp_path, 1, 2)
    (tmp_path / TRACKER).write_text(text)
    found = find_intact(tmp_path)
    assert found.step == 2
    assert [step for step, _ in found.skipped] == [None]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("x", path)])
def test_a_tracker_that_is_no_file_is_reported_and_the_newest_step_serves(tmp_path, make):
    save_discover(tmp_path, 1, 2)
    (tmp_path / TRACKER).unlink()
    make(tmp_path / TRACKER)
    found = find_intact(tmp_path)
    assert found.step == 2
    assert "cannot be read" in found.skipped[0].reason


def test_a_tracker_set_back_by_hand_is_obeyed(tmp_path):
    save_discover(tmp_path, 1, 2, 3)
    (tmp_path / TRACKER).write_text("1")
    found = find_intact(tmp_path)
    assert found.step == 1
    assert [step for step, _ in found.skipped] == [3, 2]
    assert "never acknowledged, or set back by hand" in found.skipped[0].reason


def test_a_step_after_the_tracker_serves_when_nothing_before_it_does(tmp_path):
    save_discover(tmp_path, 1, 2)
    (tmp_path / TRACKER).write_text("1")
    damage(tmp_path, 1)
    found = find_intact(tmp_path)
    assert found.step == 2
    assert [step for step, _ in found.skipped] == [1]


def test_a_step_whose_second_save_was_killed_is_found_where_it_was_moved(tmp_path):
    save_discover(tmp_path, 5)
    os.rename(tmp_path / "global_step_5", tmp_path / ".global_step_5.displaced")
    assert find_intact(tmp_path).step == 5


def test_folders_of_other_programs_are_reported_not_used(tmp_path):
    save_discover(tmp_path, 1)
    (tmp_path / "global_step_2").mkdir()
    (tmp_path / "global_step_2" / "model_world_size_1_rank_0.pt").write_bytes(b"\x80\x04")
    (tmp_path / TRACKER).write_text("2")
    found = find_intact(tmp_path)
    assert found.step == 1
    assert "manifest.json is missing" in found.skipped[0].reason


def test_a_refusal_names_the_setting_that_accepts_the_changes(tmp_path, caplog):
    changes = {"code": {"custom_reward_function.path": "one"}}
    save(store(tmp_path, **changes), 1)
    changed = {"code": {"custom_reward_function.path": "two"}, "config": {"algorithm.gamma": 0.5}}
    with pytest.raises(CheckpointMismatchError) as refused:
        store(tmp_path, **changed).resume()
    assert "code: custom_reward_function.path was 'one' and is 'two'" in str(refused.value)
    assert "trainer.resume_may_change=[code,algorithm.gamma]" in str(refused.value)
    accepted = ["code", "algorithm.gamma"]
    again = CheckpointStore(tmp_path, fingerprint={**PRINT, **changed}, accepted=accepted)
    assert again.resume().step == 1
    assert "continuing although a change was made: code: custom_reward_function" in caplog.text


# ---- one run per folder --------------------------------------------------------------------------

HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from verl.utils.checkpoint.layout import holding

with holding({"trainer.default_local_dir": Path(sys.argv[1])}):
    ready, tell = os.pipe()
    forked = os.fork()
    if forked == 0:
        os.write(tell, b"!")  # it has run, so it has closed what it must not hold
        time.sleep(600)
        os._exit(0)
    os.read(ready, 1)
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(forked, started.pid, flush=True)
    time.sleep(600)
"""


def test_a_folder_belongs_to_one_run_and_is_free_as_soon_as_that_is_dead(tmp_path):
    lock = {"trainer.default_local_dir": tmp_path / "new" / LOCK}
    command = [sys.executable, "-c", HOLDER, str(lock["trainer.default_local_dir"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        children = list(map(int, other.stdout.readline().split()))
        who = rf"in use by another run: process {other.pid} on {socket.gethostname()} since 20"
        with pytest.raises(FolderInUse, match=who) as refused, holding(lock):
            pass
        assert "set another trainer.default_local_dir" in str(refused.value)
        assert refused.value.exit_code == 2
        other.kill()
        other.wait(60)
        with holding(lock), holding(lock):  # its children live, and hold nothing
            assert str(os.getpid()) in lock["trainer.default_local_dir"].read_text()
        for child in children:
            os.kill(child, signal.SIGKILL)


KILLED = """
import os, signal, sys
from pathlib import Path
from verl.utils.checkpoint.layout import holding, note_phase

folder = Path(sys.argv[1])
with holding({"trainer.default_local_dir": folder / "a", "trainer.rollout_data_dir": folder / "b"}):
    note_phase("update_actor of step 12")
    if sys.argv[2:]:
        Path(sys.argv[2]).write_text(str(os.getpid()))  # a group with little memory
        pages = [bytearray(b"x") * (8 << 20) for _ in range(200)]
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run_killed(folder, *group):
    """The process id of a run that was killed while it held two locks below `folder`."""
    killed = subprocess.Popen([sys.executable, "-c", KILLED, str(folder), *group])
    assert killed.wait(120) == -signal.SIGKILL
    return killed.pid, {f"trainer.{name}": folder / name for name in ("a", "b")}


@pytest.mark.parametrize("num_oom_kills", [0, 2])
def test_a_run_that_was_killed_is_told_once_at_the_next_start(
    tmp_path, monkeypatch, caplog, num_oom_kills
):
    process, locks = run_killed(tmp_path)
    before = layout.num_oom_kills()
    monkeypatch.setattr(layout, "num_oom_kills", lambda: before + num_oom_kills)
    with holding(locks):
        (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"the last run here, process {process} on {socket.gethostname()} since ")
    assert re.search(r"it died in update_actor of step 12, with 0\.[0-9] GiB", said)
    assert ("the kernel has killed 2 processes" in said) == bool(num_oom_kills)
    assert ("kill -9" in said) == (not num_oom_kills)


def test_a_run_that_ends_or_fails_leaves_no_crash_report(tmp_path, caplog):
    lock = {"trainer.default_local_dir": tmp_path / LOCK}
    with pytest.raises(FileNotFoundError), holding(lock):
        (tmp_path / "gone").read_text()
    with holding(lock):
        note_phase("gen of step 1")
    (tmp_path / LOCK).write_text("process 1 on an older version")
    with holding(lock):
        pass
    assert not caplog.records


def test_a_full_disk_does_not_end_a_run_that_tells_its_phase(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with holding({"trainer.default_local_dir": tmp_path / LOCK}):
        monkeypatch.setattr(os, "pwrite", refuse)
        note_phase("gen of step 1")


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with holding({"trainer.rollout_data_dir": tmp_path / LOCK}):
        pass
    assert "has no locks (No locks available); see to it that no other run" in caplog.text


def test_a_folder_that_cannot_be_made_is_refused_before_the_run(tmp_path):
    (tmp_path / "file").touch()
    locks = {"trainer.default_local_dir": tmp_path / "file" / "run" / LOCK}
    refusal = r"default_local_dir is .*run, which cannot be written"
    with pytest.raises(Misuse, match=refusal), holding(locks):
        pass


def test_a_full_disk_at_the_start_is_a_warning(tmp_path, monkeypatch, caplog):
    lock = tmp_path / LOCK

    def refuse(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    really = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *rest: (refuse if path == lock else really)(path, *rest)
    )
    with holding({"trainer.default_local_dir": lock}):
        pass
    assert "cannot be locked" in caplog.text
