"""Small things around Ray and event loops. Ray itself is imported only where it is used."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from verl.utils.tensor_rows import BatchError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

MAX_PUT_THREADS = 16


def parallel_put(data_list: Sequence[Any], max_workers: int | None = None) -> list[Any]:
    """Put each object into Ray's object store, several at a time; references in the same order."""
    import ray  # noqa: PLC0415

    if not data_list:
        raise BatchError("there is nothing to put: data_list is empty")
    if len(data_list) == 1:
        return [ray.put(data_list[0])]
    threads = min(len(data_list), max_workers or MAX_PUT_THREADS)
    with ThreadPoolExecutor(max_workers=threads) as pool:
        return list(pool.map(ray.put, data_list))


def node_ip_address() -> str:
    """The address under which the other nodes of the cluster reach this one."""
    import ray  # noqa: PLC0415

    return ray.util.get_node_ip_address().strip("[]")


def visible_device_index() -> int:
    """The number of the device that Ray assigned to this worker; 0 where it assigned none."""
    import ray  # noqa: PLC0415

    assigned = ray.get_runtime_context().get_accelerator_ids()
    return next((int(ids[0]) for ids in assigned.values() if ids), 0)


class _OwnLoop:
    """An event loop that is closed when its thread ends."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def __del__(self) -> None:
        self.loop.close()


class _PerThread(threading.local):
    own: _OwnLoop | None = None


_per_thread = _PerThread()


def get_event_loop() -> asyncio.AbstractEventLoop:
    """The running event loop, or else this thread's own, which is created on first use."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        if _per_thread.own is None or _per_thread.own.loop.is_closed():
            _per_thread.own = _OwnLoop()
        return _per_thread.own.loop


def auto_await(
    function: Callable[Parameters, Coroutine[Any, Any, Result]],
) -> Callable[Parameters, Any]:
    """Make an async function callable from both worlds: awaited in a loop, run without one."""

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
        loop = get_event_loop()
        coroutine = function(*args, **kwargs)
        return coroutine if loop.is_running() else loop.run_until_complete(coroutine)

    return call
