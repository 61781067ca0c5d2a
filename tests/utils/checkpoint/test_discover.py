"""A resumed run continues from the right step and says what it passed over."""

import logging
import os

import pytest

from verl.utils.checkpoint.layout import NoIntactCheckpointError
from verl.utils.checkpoint.store import find_intact, staged_step

TRACKER = "latest_checkpointed_iteration.txt"


def save(root, *steps):
    for step in steps:
        with staged_step(root, step, fingerprint={}) as folder:
            (folder / "state.txt").write_text(f"step {step}")


def damage(root, step):
    (root / f"global_step_{step}" / "state.txt").write_text(f"STEP {step}")


def test_an_empty_or_missing_root_is_a_new_run(tmp_path):
    assert find_intact(tmp_path) is None
    assert find_intact(tmp_path / "nowhere") is None


def test_the_newest_step_is_found_by_number_not_by_name(tmp_path):
    save(tmp_path, 8, 9, 10)
    found = find_intact(tmp_path)
    assert (found.step, found.path, found.skipped) == (10, tmp_path / "global_step_10", [])
    (tmp_path / TRACKER).unlink()
    assert find_intact(tmp_path).step == 10


def test_a_damaged_step_is_passed_over_with_the_reason(tmp_path, caplog):
    save(tmp_path, 1, 2, 3)
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
    save(tmp_path, 1, 2)
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
    save(tmp_path, 1, 2)
    (tmp_path / TRACKER).write_text("99\n")
    found = find_intact(tmp_path)
    assert found.step == 2
    assert found.skipped == [(99, f"{TRACKER} names it, but its folder is missing")]


@pytest.mark.parametrize("text", ["", "latest", "-1", "1.5", "٣", "9" * 40, "\0\0"])
def test_a_tracker_without_a_number_is_reported_and_the_newest_step_serves(tmp_path, text):
    save(tmp_path, 1, 2)
    (tmp_path / TRACKER).write_text(text)
    found = find_intact(tmp_path)
    assert found.step == 2
    assert [step for step, _ in found.skipped] == [None]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("x", path)])
def test_a_tracker_that_is_no_file_is_reported_and_the_newest_step_serves(tmp_path, make):
    save(tmp_path, 1, 2)
    (tmp_path / TRACKER).unlink()
    make(tmp_path / TRACKER)
    found = find_intact(tmp_path)
    assert found.step == 2
    assert "cannot be read" in found.skipped[0].reason


def test_a_tracker_set_back_by_hand_is_obeyed(tmp_path):
    save(tmp_path, 1, 2, 3)
    (tmp_path / TRACKER).write_text("1")
    found = find_intact(tmp_path)
    assert found.step == 1
    assert [step for step, _ in found.skipped] == [3, 2]
    assert "never acknowledged, or set back by hand" in found.skipped[0].reason


def test_a_step_after_the_tracker_serves_when_nothing_before_it_does(tmp_path):
    save(tmp_path, 1, 2)
    (tmp_path / TRACKER).write_text("1")
    damage(tmp_path, 1)
    found = find_intact(tmp_path)
    assert found.step == 2
    assert [step for step, _ in found.skipped] == [1]


def test_a_step_whose_second_save_was_killed_is_found_where_it_was_moved(tmp_path):
    save(tmp_path, 5)
    os.rename(tmp_path / "global_step_5", tmp_path / ".global_step_5.displaced")
    assert find_intact(tmp_path).step == 5


def test_folders_of_other_programs_are_reported_not_used(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "global_step_2").mkdir()
    (tmp_path / "global_step_2" / "model_world_size_1_rank_0.pt").write_bytes(b"\x80\x04")
    (tmp_path / TRACKER).write_text("2")
    found = find_intact(tmp_path)
    assert found.step == 1
    assert "manifest.json is missing" in found.skipped[0].reason
