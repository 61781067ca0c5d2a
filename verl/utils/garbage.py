"""What Python's garbage collector may leave alone.

A full collection visits every object of the process. With torch and a model loaded that takes a
third of a second, and a rollout, whose host side makes many small lists, sets it off several times.
"""

import gc


def spare_present_objects() -> None:
    """Collect what is garbage now; whatever is left is not visited by later collections.

    Call it when what lives as long as the process has been built.
    """
    gc.collect()
    gc.freeze()
