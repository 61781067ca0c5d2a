"""One run's checkpoints: kept, deleted and resumed by rule."""

import os

import pytest

from verl.utils.checkpoint.layout import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointSaveError,
    list_steps,
)
from verl.utils.checkpoint.store import CheckpointStore, steps_to_keep

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
