"""A process that dies, hangs or goes silent: everybody hears of it, and nothing stale is served."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from tests.pace import wait_until
from tests.workers.rollout.process.counting import BREAKS, HANGS
from tests.workers.rollout.process.helpers import (
    REPOSITORY,
    counting_spec,
    counting_weights,
    request,
    runs,
    started,
)
from verl.workers.rollout.base import EngineLostError
from verl.workers.rollout.process.child import Child
from verl.workers.rollout.process.client import EngineStartError
from verl.workers.rollout.process.wire import encode
from verl.workers.weight_sync import WeightsNotReadyError

LONG = 100_000
TIMEOUT_SECONDS = 4.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    spec = counting_spec(
        tmp_path_factory.mktemp("engine"),
        {"step_seconds": 0.01, "starts_helper": True},
        answer_seconds=TIMEOUT_SECONDS,
        work_seconds=TIMEOUT_SECONDS,
        sync_seconds=TIMEOUT_SECONDS / 2,
    )
    engine = started(spec)
    yield engine
    engine.close()


@pytest.fixture
def ready(engine):
    """Alive, with version 1 of the weights."""
    if not engine.is_alive():
        engine.restart()
        assert_serves_nothing(engine)
    engine.update_weights(counting_weights(100), version=1)
    return engine


def assert_serves_nothing(engine):
    with pytest.raises(WeightsNotReadyError):
        engine.generate_batch([request([1])])
    with pytest.raises(WeightsNotReadyError):
        _ = engine.policy_version


def assert_is_lost(engine, pid, helper):
    """Nothing is answered, and nobody of the group is left."""
    with pytest.raises(EngineLostError):
        engine.generate_batch([request([1])])
    with pytest.raises(EngineLostError):
        engine.update_weights(counting_weights(2), version=2)
    with pytest.raises(EngineLostError):
        _ = engine.policy_version
    assert not engine.is_alive()
    wait_until(lambda: not runs(pid) and not runs(helper), "the group is gone")


async def lose_while_serving(engine, lose, seconds):
    """Fifty callers, a listener and a thread wait when `lose` is called; all hear of it."""
    pid, helper = engine.pid, int(engine.facts.version)

    async def listen():
        async for _ in engine.stream(request([1], max_tokens=LONG)):
            pass

    tasks = [asyncio.create_task(engine.generate(request([n], LONG))) for n in range(50)]
    tasks.append(asyncio.create_task(listen()))
    tasks.append(
        asyncio.create_task(asyncio.to_thread(engine.generate_batch, [request([3], LONG)]))
    )
    await asyncio.sleep(0.3)
    lose(engine)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), seconds + 60)
    assert [type(result) for result in results] == [EngineLostError] * 52
    assert_is_lost(engine, pid, helper)
    return str(results[0])


async def test_a_process_killed_while_it_serves_is_noticed_at_once(ready):
    said = await lose_while_serving(ready, lambda e: os.kill(e.pid, signal.SIGKILL), 0)
    assert "ended by SIGKILL" in said


async def test_a_process_that_is_stopped_counts_as_lost_when_it_is_silent(ready):
    said = await lose_while_serving(
        ready, lambda e: os.kill(e.pid, signal.SIGSTOP), TIMEOUT_SECONDS
    )
    assert "it was silent for" in said


async def test_a_step_that_never_ends_counts_as_lost(ready):
    def hang(engine):
        asyncio.get_running_loop().run_in_executor(None, hanging, engine)

    def hanging(engine):
        with suppress(EngineLostError):
            engine.generate_batch([request([HANGS])])

    said = await lose_while_serving(ready, hang, TIMEOUT_SECONDS)
    assert "one piece of work" in said


async def test_a_step_that_fails_ends_the_process_and_shows_its_traceback(ready):
    with pytest.raises(EngineLostError, match="RuntimeError: a step broke"):
        await ready.generate(request([BREAKS]))


def test_a_process_killed_while_idle_is_noticed_without_a_call(ready):
    pid, helper = ready.pid, int(ready.facts.version)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not ready.is_alive(), "the loss is noticed")
    assert_is_lost(ready, pid, helper)


def test_a_process_killed_during_an_update_holds_nothing_after_its_restart(ready):
    def deadly():
        yield from counting_weights(7)
        os.kill(ready.pid, signal.SIGKILL)
        yield from ((f"late {n}", weight) for n, (_, weight) in enumerate(counting_weights(0)))

    with pytest.raises(EngineLostError):
        ready.update_weights(deadly(), version=2)
    ready.restart()
    assert_serves_nothing(ready)
    ready.update_weights(counting_weights(7), version=2)
    assert ready.generate_batch([request([1], max_tokens=1)])[0][0].token_ids == [8]


def test_a_process_that_is_closed_tells_those_who_wait(ready):
    said = []

    def wait():
        try:
            ready.generate_batch([request([1], LONG)])
        except EngineLostError as error:
            said.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    ready.close()
    thread.join(timeout=60)
    assert "the engine's process is lost" in said[0]


def test_an_engine_whose_line_is_closed_ends_with_all_that_it_started(tmp_path):
    spec = counting_spec(tmp_path, {"starts_helper": True})
    child = Child(None, spec.environment, heartbeat_seconds=60.0)  # the main thread sees it first
    child.handshake(60.0)
    child.wire.send(
        encode(
            {
                "call": "build",
                "number": 0,
                "build": spec.build,
                "options": spec.options,
                "has_weights": True,
            }
        )
    )
    (answer,) = child.wire.arrived(60.0)
    helper = int(answer["value"]["version"])
    assert runs(helper)
    child.wire.close()
    wait_until(lambda: not runs(child.pid) and not runs(helper), "the group is gone")
    child.end()
    assert "SIGKILL" in child.stderr_tail()


def test_an_engine_that_was_dropped_or_closed_ends_and_is_not_started_again(tmp_path):
    engine = started(counting_spec(tmp_path))
    pid = engine.pid
    del engine
    gc.collect()
    wait_until(lambda: not runs(pid), "nobody can close it any more")
    engine = started(counting_spec(tmp_path))
    engine.close()
    with pytest.raises(EngineStartError, match="was closed"):
        engine.restart()  # as a recovery does that was under way


PARENT = """
import os, sys, time
from pathlib import Path
from tests.workers.rollout.process.helpers import counting_spec, request, started

engine = started(counting_spec(Path(sys.argv[1]), {"starts_helper": True}, has_weights=True))
fork = os.fork()
if fork == 0:
    time.sleep(600)  # holds this process's end of the line open
print(engine.pid, engine.facts.version, fork, flush=True)
engine.generate_batch([request([1], max_tokens=10**9)])
"""


def test_nothing_is_left_when_the_parent_is_killed(tmp_path):
    """Not even when a fork of the parent keeps the line open."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout as output:
        pid, helper, fork = output.readline().split()
        try:
            assert runs(int(pid))
            assert runs(int(helper))
            os.kill(parent.pid, signal.SIGKILL)
            parent.wait(timeout=60)
            wait_until(lambda: not runs(int(pid)), "the engine ends with its parent")
            wait_until(lambda: not runs(int(helper)), "and what it started")
            assert runs(int(fork))
            assert not list(temporary.iterdir())
        finally:
            os.kill(int(fork), signal.SIGKILL)
