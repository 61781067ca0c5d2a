"""How often Python looks for garbage.

A full collection visits every object of the process. With torch and a model loaded that takes a
third of a second, and a rollout, whose host side makes many small lists, sets it off several times
while the device waits.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 20_000
"""Python looks for garbage when this many more objects have been made than given up. Its own number
is 700, which a decode step of a thousand rows passes several times. Every hundredth look is a full
one, so with this number there is one in many steps."""


def collect_seldom() -> None:
    """From now on look for garbage when there are many new objects, in this whole process."""
    first, *others = gc.get_threshold()
    gc.set_threshold(max(first, NEW_OBJECTS), *others)


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """The same while the context lasts."""
    before = gc.get_threshold()
    collect_seldom()
    try:
        yield
    finally:
        gc.set_threshold(*before)
