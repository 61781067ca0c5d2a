"""Work of a device that runs beside its usual work: queues of their own, with waits both ways.

    usual stream    ... | passes ............................ | waits | optimizer step
    other stream        | waits | decode, decode, decode, ... |

On a CPU there is one queue, and everything here does nothing.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch

from verl.utils.device import torch_module_of

HIGH_PRIORITY = -1


@contextmanager
def beside_usual_work(device: torch.device) -> Iterator[None]:
    """What is started inside runs beside what is started on the usual stream meanwhile.

    It begins after all work before it, and all work behind it waits for it. Its kernels go first.
    """
    if device.type == "cpu":
        yield
        return
    other, usual = other_stream(device), usual_stream(device)
    other.wait_stream(usual)
    try:
        with on_stream(other, device):
            yield
    finally:
        usual.wait_stream(other)


@lru_cache
def other_stream(device: torch.device) -> Any:
    """One for all time: memory is cached by stream."""
    return torch_module_of(device.type).Stream(device, priority=HIGH_PRIORITY)


def usual_stream(device: torch.device) -> Any:
    """The stream in use; None on a CPU."""
    return None if device.type == "cpu" else torch_module_of(device.type).current_stream(device)


def on_stream(stream: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Start work there; None is where it is started anyway."""
    return nullcontext() if stream is None else torch_module_of(device.type).stream(stream)
