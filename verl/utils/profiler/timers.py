"""How long a stage took, and where it stands on a profiler's time line."""

import time
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager

import torch

from verl.utils.device import is_cuda_available


@contextmanager
def simple_timer(name: str, timing_raw: MutableMapping[str, float]) -> Iterator[None]:
    """Add the seconds the block took to `timing_raw[name]`, also when it raises."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start


@contextmanager
def marked_timer(
    name: str,
    timing_raw: MutableMapping[str, float],
    color: str | None = None,
    domain: str | None = None,
    category: str | None = None,
) -> Iterator[None]:
    """`simple_timer` whose block also appears by name in a running profiler.

    `color`, `domain` and `category` are accepted for scripts that pass them; torch's NVTX ranges
    carry a name only.
    """
    with mark(name), simple_timer(name, timing_raw):
        yield


@contextmanager
def mark(name: str) -> Iterator[None]:
    """A named range in torch's profiler and, on CUDA, in Nsight Systems."""
    with ExitStack() as stack:
        stack.enter_context(torch.profiler.record_function(name))
        if is_cuda_available:
            torch.cuda.nvtx.range_push(name)
            stack.callback(torch.cuda.nvtx.range_pop)
        yield
