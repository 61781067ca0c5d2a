"""Groups are drawn in the order in which they were announced, each once."""

import threading

import pytest
import torch

from verl.data_plane import RowsLost, create
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


@pytest.fixture
def plane():
    plane = create("in_process", "replay")
    yield plane
    plane.close()


def put(plane, name, step=0):
    plane.put(f"train/{name}", {"ids": torch.tensor([[step]])}, {"global_steps": step})


def names(receipts):
    return [receipt.key.rpartition("/")[2] for receipt in receipts]


def test_what_was_announced_first_is_drawn_first_whichever_is_complete_first(plane):
    plane.reserve([f"train/{name}" for name in "abcd"])
    for name in "dca":
        put(plane, name)
    buffer = ReplayBuffer(plane, timeout_seconds=30)
    late = threading.Timer(0.05, put, [plane, "b"])
    late.start()
    assert names(buffer.sample(1, "train", 2)) == ["a", "b"]  # waits for b, although d is there
    late.join()
    assert names(buffer.sample(2, "train", 2)) == ["c", "d"]
    with pytest.raises(ValueError, match="0 are announced that no step has had"):
        buffer.sample(3, "train", 1)


def test_groups_that_are_too_old_are_left_out_and_counted(plane):
    for name, step in (("a", 0), ("b", 3), ("c", 2), ("d", 4)):
        put(plane, name, step)
    buffer = ReplayBuffer(plane, max_off_policy_threshold=1)
    assert names(buffer.sample(5, "train", 2)) == ["b", "d"]  # a is 4 updates old, c is 2
    assert buffer.num_evicted == 2
    with pytest.raises(ValueError, match="it counts steps"):
        ReplayBuffer(plane, max_off_policy_threshold=-1)


def test_a_group_whose_producer_has_ended_is_an_error(plane):
    plane.reserve(["train/a"], producer="worker 3")
    plane.lose("worker 3")
    with pytest.raises(RowsLost, match="worker 3"):
        ReplayBuffer(plane, timeout_seconds=30).sample(1, "train", 1)
