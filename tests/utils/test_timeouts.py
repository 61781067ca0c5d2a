"""A wait ends in time, and whoever is cancelled meanwhile stays cancelled."""

import asyncio
from pathlib import Path

import pytest

import verl
from verl.utils.timeouts import within


async def after(seconds: float, value: int = 1) -> int:
    await asyncio.sleep(seconds)
    return value


async def fails() -> None:
    raise KeyError("mine")


def test_the_result_or_the_error_comes_through():
    assert asyncio.run(within(after(0), 10)) == 1
    assert asyncio.run(within(after(0), None)) == 1
    with pytest.raises(KeyError, match="mine"):
        asyncio.run(within(fails(), 10))


def test_what_is_late_is_cancelled_and_has_cleaned_up():
    steps = []

    async def careful() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)  # such as giving back a lease
            steps.append("cleaned up")

    with pytest.raises(TimeoutError):
        asyncio.run(within(careful(), 0.05))
    assert steps == ["cleaned up"]


def test_who_is_cancelled_cancels_what_was_waited_for():
    async def main() -> bool:
        inner = asyncio.ensure_future(asyncio.sleep(60))
        outer = asyncio.create_task(within(inner, 60))
        await asyncio.sleep(0)
        outer.cancel()
        await asyncio.wait({outer})
        return outer.cancelled() and inner.cancelled()

    assert asyncio.run(main())


@pytest.mark.parametrize("fault", [None, KeyError("mine")])
def test_a_cancellation_that_comes_together_with_the_result_counts(fault):
    async def main() -> bool:
        future = asyncio.get_running_loop().create_future()
        outer = asyncio.create_task(within(future, 60))
        await asyncio.sleep(0)
        future.set_result(1) if fault is None else future.set_exception(fault)
        outer.cancel()
        await asyncio.wait({outer})
        return outer.cancelled()

    assert asyncio.run(main())


def test_nothing_waits_in_the_way_that_forgets_a_cancellation():
    root = Path(verl.__path__[0])
    found = [path for path in root.rglob("*.py") if "asyncio.wait_for(" in path.read_text()]
    assert found == [], "verl.utils.timeouts.within takes its place"
