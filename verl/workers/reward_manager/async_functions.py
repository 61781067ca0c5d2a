"""Telling `async def` from `def`, and awaiting what others wrote."""

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine; also for partial and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or (
        not inspect.isroutine(function) and inspect.iscoroutinefunction(type(function).__call__)
    )


async def awaited(work: Awaitable[Any]) -> Any:
    """What it gives; `SystemExit` and the like end the call, not the event loop."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(repr(error)) from error
