"""Waiting for so long, without forgetting that one was cancelled meanwhile."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(awaitable: Awaitable[T], seconds: float | None) -> T:
    """What `awaitable` gives, or TimeoutError after `seconds`; then it is cancelled, and has ended.

    `asyncio.wait_for` does the same, but before Python 3.12 it forgets a cancellation that comes
    together with the result: who was cancelled goes on, and what cancelled it waits for ever.
    """
    work = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({work}, timeout=seconds)
    finally:
        is_late = not work.done()
        if is_late:
            work.cancel()
            await asyncio.wait({work})
        if not work.cancelled():
            work.exception()  # seen, also where nobody takes it
    try:
        return await work  # which is done
    except asyncio.CancelledError:
        if is_late:
            raise TimeoutError from None
        raise
