"""Nothing that tools hold outside of the process outlives its trajectory: cancelled, or killed."""

import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.children import children
from tests.pace import pace
from verl.tools.base_tool import BaseTool
from verl.tools.leases import ToolSet
from verl.tools.orphans import start_reaping
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


@dataclass
class Call:
    name: str
    arguments: str = "{}"


class Outside(BaseTool):
    """Each instance is a file in a folder, as a container or a rented machine would be."""

    def __init__(self, folder, name="outside"):
        function = {"type": "function", "function": {"name": name}}
        super().__init__({}, OpenAIFunctionToolSchema.model_validate(function))
        self.folder = Path(folder)

    async def create(self, instance_id=None, **kwargs):
        await asyncio.sleep(0)
        (self.folder / instance_id).touch()
        await asyncio.sleep(0)
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        await asyncio.sleep(0.001 * random.random())
        assert (self.folder / instance_id).exists()
        return ToolResponse(text="ok"), 0.0, {}

    async def release(self, instance_id, **kwargs):
        await asyncio.sleep(0)
        (self.folder / instance_id).unlink(missing_ok=True)  # `create` may have been cancelled

    async def reap(self, instance_id):
        (self.folder / instance_id).unlink(missing_ok=True)


async def trajectory(tools, owner, num_calls=3):
    async with tools.lease(owner) as lease:
        for _ in range(num_calls):
            outcome = await lease.call(Call("outside"))
            assert outcome.kind == "reply", outcome


@pytest.fixture
def outside(tmp_path):
    folder = tmp_path / "outside"
    folder.mkdir()
    return folder


def test_a_thousand_random_cancels_leak_nothing(tmp_path, outside):
    dice = random.Random(5)
    tools = ToolSet([Outside(outside)], record_folder=tmp_path / "records")
    ended = []

    async def cancelled(number, seconds):
        task = asyncio.create_task(trajectory(tools, str(number)))
        await asyncio.wait([task], timeout=seconds * dice.random())
        task.cancel()
        ended.extend(await asyncio.gather(task, return_exceptions=True))

    async def all_of_them():
        for start in range(0, 1000, 50):
            begin = time.perf_counter()
            await asyncio.gather(*(trajectory(tools, f"whole-{n}") for n in range(50)))
            usual = time.perf_counter() - begin
            await asyncio.gather(*(cancelled(start + n, 2 * usual) for n in range(50)))

    asyncio.run(all_of_them())
    tools.close()
    assert {type(one) for one in ended} == {asyncio.CancelledError, type(None)}
    assert list(outside.iterdir()) == []
    assert list((tmp_path / "records").iterdir()) == []


def _run(outside, records, ready):
    tools = ToolSet([Outside(outside)], record_folder=records)

    async def on_and_on(number):
        while True:
            await trajectory(tools, str(number), num_calls=1 + number % 3)
            ready.set()

    async def many():
        await asyncio.gather(*(on_and_on(number) for number in range(8)))

    asyncio.run(many())


@pytest.mark.parametrize("num_kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_what_killed_runs_held_is_ended_at_the_next_start(tmp_path, outside, num_kills):
    dice, records = random.Random(7), tmp_path / "records"
    num_left = 0
    for _ in range(num_kills):
        ready = children.Event()
        child = children.Process(target=_run, args=(outside, records, ready))
        child.start()
        assert ready.wait(60 * pace())
        time.sleep(0.01 * dice.random())  # somewhere in the middle of it
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        left = len(list(outside.iterdir()))
        num_left += left > 0
        tools = ToolSet([Outside(outside)], record_folder=records)
        reaped = start_reaping(tools, records).result(timeout=60 * pace())
        assert reaped.left == []
        assert reaped.num_ended >= left
        assert list(outside.iterdir()) == []
        tools.close()
        assert list(records.iterdir()) == []
    assert num_left > 0


def test_what_cannot_be_ended_is_named_and_tried_again(tmp_path, outside, caplog):
    records = tmp_path / "records"
    ready = children.Event()
    child = children.Process(target=_run, args=(outside, records, ready))
    child.start()
    assert ready.wait(60 * pace())
    os.kill(child.pid, signal.SIGSTOP)  # a run that lives keeps what it holds
    living = ToolSet([Outside(outside)])
    assert start_reaping(living, records).result(timeout=60 * pace()).num_ended == 0
    (outside / "mine").touch()
    child.kill()
    child.join()
    other = ToolSet([Outside(outside, "another")])
    reaped = start_reaping(other, records).result(timeout=60 * pace())
    if reaped.left:
        assert "this run has no such tool" in caplog.text
        assert start_reaping(living, records).result(timeout=60 * pace()).left == []
    assert [one.name for one in outside.iterdir()] == ["mine"]
    assert list(records.iterdir()) == []
    for tools in (living, other):
        tools.close()
