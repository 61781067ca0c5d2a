"""Looking at the processes of this machine, from outside the sandbox."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def count_processes(name: str) -> int:
    """Threads on this machine that carry the name."""
    count = 0
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/comm") as file:
                    count += file.read().strip() == name
        except (FileNotFoundError, ProcessLookupError):
            continue
    return count


@contextmanager
def peak_of(name: str) -> Iterator[list[int]]:
    """The most threads of that name seen at one time, filled in when the block ends."""
    peak, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.01):
            peak[0] = max(peak[0], count_processes(name))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        is_over.set()
        watcher.join(60)
