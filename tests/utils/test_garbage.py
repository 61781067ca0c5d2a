"""A run looks for garbage seldom, and leaves the collector as it found it."""

import gc
import weakref

import pytest

from verl.utils.garbage import NEW_OBJECTS, collect_seldom, collecting_seldom


class Node:
    """Refers to itself, so only the collector can free it."""

    def __init__(self):
        self.itself = self


def collections_during(work):
    found = []

    def note(phase, info):
        if phase == "start":
            found.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        work()
    finally:
        gc.callbacks.remove(note)
    return found


def visits_of_an_engine():
    """Each has some objects per row at the same time."""
    for _ in range(100):
        [[row] for row in range(NEW_OBJECTS // 2)]


def test_visits_of_an_engine_set_no_collection_off():
    assert len(collections_during(visits_of_an_engine)) > 100
    with collecting_seldom():
        assert collections_during(visits_of_an_engine) == []


def test_garbage_is_still_collected():
    with collecting_seldom():
        node = weakref.ref(Node())
        assert node() is not None
        kept = [[number] for number in range(2 * NEW_OBJECTS)]
        assert node() is None
        assert kept


def failing_run():
    with collecting_seldom():
        assert gc.get_threshold()[0] == NEW_OBJECTS
        raise RuntimeError("of a step")


def test_the_collector_is_afterwards_as_it_was():
    before = gc.get_threshold()
    with pytest.raises(RuntimeError, match="of a step"):
        failing_run()
    assert gc.get_threshold() == before


def test_whoever_wants_fewer_collections_still_gets_them():
    before = gc.get_threshold()
    try:
        gc.set_threshold(3 * NEW_OBJECTS, 5, 7)
        collect_seldom()
        assert gc.get_threshold() == (3 * NEW_OBJECTS, 5, 7)
        gc.set_threshold(700, 5, 7)
        collect_seldom()
        assert gc.get_threshold() == (NEW_OBJECTS, 5, 7)
    finally:
        gc.set_threshold(*before)
