"""Garbage is collected between steps; a run leaves the collector as it found it."""

import gc
import weakref

import pytest

from verl.utils.garbage import NEW_OBJECTS, CollectsBetweenSteps


class Node:
    """Refers to itself, so only the collector can free it."""

    def __init__(self):
        self.itself = self


def test_inside_a_step_the_collector_seldom_runs():
    runs = []

    def note(phase, info):
        if phase == "start":
            runs.append(info["generation"])

    with CollectsBetweenSteps() as garbage:
        garbage.step_done()
        gc.callbacks.append(note)
        try:
            for _ in range(100):  # visits of an engine: each has a few objects per row
                [[row] for row in range(NEW_OBJECTS // 2)]
        finally:
            gc.callbacks.remove(note)
    assert not runs


def test_the_garbage_of_a_step_is_collected_after_it():
    with CollectsBetweenSteps() as garbage:
        for _ in range(3):
            node = weakref.ref(Node())
            assert node() is not None
            garbage.step_done()
            assert node() is None


def test_what_the_first_step_leaves_is_spared_until_the_run_is_over():
    kept = Node()
    node = weakref.ref(kept)
    with CollectsBetweenSteps() as garbage:
        garbage.step_done()
        assert gc.get_freeze_count() > 1000
        del kept
        garbage.step_done()
        gc.collect()
        assert node() is not None
    gc.collect()
    assert node() is None


def failing_run():
    with CollectsBetweenSteps() as garbage:
        garbage.step_done()
        assert gc.get_threshold()[0] == NEW_OBJECTS
        raise RuntimeError("of a step")


def test_the_collector_is_afterwards_as_it_was():
    before = gc.get_threshold()
    with pytest.raises(RuntimeError, match="of a step"):
        failing_run()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
