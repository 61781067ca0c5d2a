"""When Python's garbage collector runs, and what it may leave alone.

A full collection visits every object of the process. With torch and a model loaded that takes a
third of a second, and a rollout, whose host side makes many small lists, sets it off several times
while the device waits.
"""

import gc
from types import TracebackType

NEW_OBJECTS = 20_000
"""Python looks for garbage when this many more objects have been made than given up. Its own number
is 700, which a decode step of a thousand rows passes several times."""


def spare_present_objects() -> None:
    """Collect what is garbage now; whatever is left is not visited by later collections.

    Call it when what lives as long as the process has been built.
    """
    gc.collect()
    gc.freeze()


class CollectsBetweenSteps:
    """While it is open, garbage is collected after each step, and seldom inside one.

    What the first step leaves is there to stay and is not visited by later collections. When this
    is closed all is as before: a program that makes one run after the other gets the memory of each
    back.
    """

    def __init__(self) -> None:
        self._is_first = True

    def step_done(self) -> None:
        if self._is_first:
            spare_present_objects()
        else:
            gc.collect(1)  # what is older than this step has been looked at before
        self._is_first = False

    def __enter__(self) -> "CollectsBetweenSteps":
        self._thresholds = gc.get_threshold()
        gc.set_threshold(NEW_OBJECTS, *self._thresholds[1:])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()
