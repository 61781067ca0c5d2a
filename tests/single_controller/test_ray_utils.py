"""Event loops, and objects put into Ray's store."""

import asyncio
import threading

import pytest

from verl.utils.ray_utils import auto_await, get_event_loop, parallel_put


@auto_await
async def soon(value):
    await asyncio.sleep(0)
    return value


def test_an_async_function_can_be_called_like_a_plain_one():
    assert soon(3) == 3
    assert soon(4) == 4


async def test_and_awaited_inside_a_loop():
    assert await soon(3) == 3


def test_each_thread_has_its_own_loop():
    loops = [get_event_loop()]
    thread = threading.Thread(target=lambda: loops.append(get_event_loop()))
    thread.start()
    thread.join(timeout=5)
    assert loops[0] is get_event_loop()
    assert loops[0] is not loops[1]


async def test_inside_a_loop_that_loop_is_given():
    assert get_event_loop() is asyncio.get_running_loop()


@pytest.mark.ray
@pytest.mark.parametrize("count", [1, 5])
def test_objects_are_put_in_order(ray_cluster, count):
    import ray

    references = parallel_put(list(range(count)), max_workers=2)
    assert ray.get(references, timeout=30) == list(range(count))


def test_there_must_be_something_to_put():
    with pytest.raises(ValueError, match="data_list is empty"):
        parallel_put([])
