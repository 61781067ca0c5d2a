"""Running a worker's async method to its end from plain code.

Local ranks answer one call at a time, so a coroutine runs to completion on the rank's own thread,
where thread-bound state (the current CUDA device, grad mode) is as its other methods left it. All
coroutines of a thread share one event loop, so what they leave in it is there for the next.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.utils.ray_utils import get_event_loop


def call_method(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float
) -> Any:
    """The result of a sync or async method; `seconds` bounds the wait for another thread."""
    result = method(*args, **kwargs)
    return completed(result, seconds) if inspect.iscoroutine(result) else result


def completed(coroutine: Coroutine[Any, Any, Any], seconds: float) -> Any:
    loop = get_event_loop()
    if not loop.is_running():
        return loop.run_until_complete(coroutine)
    # The caller is itself a coroutine on this thread: another thread has to run this one.
    helper = ThreadPoolExecutor(max_workers=1)
    try:
        return helper.submit(asyncio.run, coroutine).result(timeout=seconds)
    finally:
        helper.shutdown(wait=False)
