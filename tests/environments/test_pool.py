"""Environments in processes: one per trajectory, killed when they hang, gone with the trainer."""

import asyncio
import os
import random
import signal
import time
from contextlib import asynccontextmanager

import pytest

from tests.environments import worlds
from verl.environments.base import Action, ToolCall
from verl.environments.pool import EnvironmentPool, EnvironmentSpec
from verl.protocol.trajectory import InfraFault
from verl.utils.processes import descendants

ECHO = EnvironmentSpec(name="tests.environments.worlds.Echo")


def bad(how, **kwargs):
    return EnvironmentSpec(name="tests.environments.worlds.Bad", kwargs={"how": how, **kwargs})


@asynccontextmanager
async def pool_of(num_workers=4, timeout_seconds=120.0):
    pool = EnvironmentPool(num_workers=num_workers, timeout_seconds=timeout_seconds)
    try:
        yield pool
    finally:
        pool.close()


@asynccontextmanager
async def leased(pool, owner="a test"):
    lease = pool.lease(owner)
    try:
        yield lease
    finally:
        await lease.release()


async def wait_until(claim):
    while not claim():
        await asyncio.sleep(0.005)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_an_episode_follows_from_its_seed_even_beside_others_in_the_same_pool():
    async with pool_of() as pool:

        async def episode(seed):
            async with leased(pool) as lease:
                first, tools = await lease.reset(ECHO, {"topic": "war"}, seed)
                assert tools == []
                later = [await lease.step(Action(word)) for word in ("a", "nonsense", "stop")]
                return [first.text, *((o.text, o.reward, o.done) for o in later)]

        alone = await episode(1)
        assert await episode(1) == alone != await episode(2)
        assert (await asyncio.gather(*map(episode, (2, 1, 3))))[1] == alone
        assert [one[1:] for one in alone[1:]] == [(0.5, False), (0.0, False), (0.5, True)]


BROKEN = {
    "raises": "KeyError: 'missing'",
    "exits": "ended during step",
    "sys.exit": "SystemExit: 3",
    "bytes": "Observation.text is bytes",
    "nothing": "an environment gave None",
    "nan": "Observation.reward is nan",
    "role": "'robot'",
    "100 MB": "the limit is 67108864",
    "info": "Observation.info has",
}


async def test_a_world_that_breaks_is_named_and_concerns_its_own_trajectory_only():
    async with pool_of() as pool, leased(pool) as sibling:
        await sibling.reset(ECHO, {}, 0)
        for how, says in BROKEN.items():
            async with leased(pool, f"trajectory {how}") as lease:
                await lease.reset(bad(how), {}, 0)
                with pytest.raises(InfraFault, match="Bad of trajectory") as caught:
                    await lease.step(Action("go"))
                assert says in str(caught.value)
        async with leased(pool) as lease:
            with pytest.raises(InfraFault, match="no world today"):
                await lease.reset(bad("reset"), {}, 0)
        assert (await sibling.step(Action("still here"))).text.startswith("still here")
        assert pool.counts.num_lost == 1  # the one that left; the others answered


MEANINGLESS = [
    ("tests.environments.worlds.Missing", "does not define 'Missing'"),
    ("tests.environments.worlds.Path", "PosixPath is no environment"),
    ("nowhere", "there is no environment 'nowhere'"),
    ({"name": ECHO.name, "kwargs": {"colour": 1}}, "takes no arguments"),
    ({"name": ECHO.name, "python": "/no/such/python"}, "/no/such/python"),
    ({"kwargs": {}}, "it needs a name"),
    ({"name": "x", "sedd": 1}, "sedd"),
]


async def test_a_name_or_argument_that_means_nothing_ends_the_run():
    async with pool_of() as pool:
        for spec, says in MEANINGLESS:
            async with leased(pool) as lease:
                with pytest.raises(ValueError, match=says):
                    await lease.reset(EnvironmentSpec.of(spec), {}, 0)


async def test_ten_megabytes_come_through_and_a_fork_of_the_world_stays_silent():
    async with pool_of() as pool:
        for how, expected in (("10 MB", "x" * (10 << 20)), ("forks", "from the parent")):
            async with leased(pool) as lease:
                await lease.reset(bad(how), {}, 0)
                assert (await lease.step(Action("go"))).text == expected


async def test_a_world_that_hangs_is_killed_at_its_deadline():
    async with pool_of() as pool, leased(pool) as sibling, leased(pool) as lease:
        await sibling.reset(ECHO, {}, 0)
        first, _ = await lease.reset(bad("hangs"), {}, 0)
        pool.timeout_seconds = 0.2
        with pytest.raises(InfraFault, match=r"step took longer than 0\.2 s"):
            await lease.step(Action("go"))
        assert not is_running(first.info["pid"])
        with pytest.raises(InfraFault, match="its process is gone"):
            await lease.step(Action("again"))
        pool.timeout_seconds = 120.0
        assert (await sibling.step(Action("b"))).reward == 0.5


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_process_that_is_killed_takes_no_other_with_it(tmp_path, number):
    async with pool_of() as pool, leased(pool) as sibling:
        await sibling.reset(ECHO, {}, 0)
        async with leased(pool) as lease:
            await lease.reset(bad("hangs", note=str(tmp_path / "pid")), {}, 0)
            step = asyncio.create_task(lease.step(Action("go")))
            await wait_until((tmp_path / "pid").exists)
            os.kill(int((tmp_path / "pid").read_text()), number)
            with pytest.raises(InfraFault, match="ended during step"):
                await step
        assert (await sibling.step(Action("b"))).reward == 0.5
        idle, _ = await pool_idle_pid(pool)
        os.kill(idle, signal.SIGKILL)
        async with leased(pool) as lease:  # an idle process that died is not handed out
            await lease.reset(ECHO, {}, 0)
            assert (await lease.step(Action("c"))).info["pid"] != idle


async def pool_idle_pid(pool):
    async with leased(pool) as lease:
        await lease.reset(ECHO, {}, 0)
        observation = await lease.step(Action("who"))
    return observation.info["pid"], observation


async def test_a_process_serves_the_next_lease_unless_something_was_left_running_in_it():
    async with pool_of() as pool:
        first, _ = await pool_idle_pid(pool)
        assert (await pool_idle_pid(pool))[0] == first
        async with leased(pool) as lease:
            await lease.reset(bad("daemon"), {}, 0)
            left = (await lease.step(Action("go"))).info["pid"]
            assert is_running(left)
        assert not is_running(left)
        assert (await pool_idle_pid(pool))[0] != first


async def test_leases_wait_for_a_free_slot_and_the_wait_is_measured():
    async with pool_of(num_workers=1) as pool:
        first, second = pool.lease("first"), pool.lease("second")
        await first.reset(ECHO, {}, 0)
        waiting = asyncio.create_task(second.reset(ECHO, {}, 0))
        third = asyncio.create_task(pool.lease("third").reset(ECHO, {}, 0))
        await asyncio.sleep(0)
        third.cancel()  # gives up in the queue: holds nothing
        assert not waiting.done()
        await first.release()
        await first.release()  # once is enough
        await waiting
        assert second.waited_seconds > 0
        assert pool.counts.waited_seconds >= second.waited_seconds
        await second.release()
        assert (pool.num_in_use, pool.counts.most_in_use, pool.counts.num_leases) == (0, 1, 2)


async def test_random_cancels_leave_no_lease_and_no_process():
    rng = random.Random(0)
    async with pool_of(num_workers=4) as pool:

        async def trajectory(how):
            async with leased(pool) as lease:
                await lease.reset(ECHO if how == "echo" else bad(how), {}, 0)
                for _ in range(3):
                    await lease.step(Action("go"))

        async def one():
            task = asyncio.create_task(trajectory(rng.choice(["echo", "hangs", "daemon"])))
            for _ in range(rng.choice([0, 1, 3, 30])):
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.wait([task])

        await asyncio.gather(*(one() for _ in range(60)))
        await wait_until(lambda: pool.num_in_use == 0)
        assert (await pool_idle_pid(pool))[1].reward == 0.5
        processes = next(iter(pool._processes.values()))
        idle = {worker.pid for worker in processes._idle}
        below = set(descendants(processes._server_pid))
        assert idle <= below
        assert len(below) == 2 * len(idle) <= 8  # a worker and its keeper
    await wait_until(lambda: not any(map(is_running, below)))


def test_nothing_is_left_of_a_trainer_that_is_killed():
    async def main(writer):
        pool = EnvironmentPool(num_workers=2)
        first, second = pool.lease("a"), pool.lease("b")
        await first.reset(ECHO, {}, 0)
        await second.reset(bad("daemon"), {}, 0)
        await second.step(Action("go"))
        os.write(writer, " ".join(map(str, descendants(os.getpid()))).encode())
        os.close(writer)
        time.sleep(3600)

    reader, writer = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        try:
            asyncio.run(main(writer))
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader) as stream:
        pids = list(map(int, stream.read().split()))
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    assert len(pids) == 6  # fork server, two keepers, two workers, the daemon
    while any(map(is_running, pids)):
        time.sleep(0.01)


async def test_methods_with_type_hints_are_tools():
    spec = EnvironmentSpec(name=f"{worlds.__file__}:Counter", kwargs={"goal": 3})
    async with pool_of() as pool, leased(pool) as lease:
        first, (tool,) = await lease.reset(spec, {"start": 1, "other": 2}, 0)
        assert first.text == "Reach 3 from 1."
        assert tool["function"]["parameters"] == {
            "type": "object",
            "properties": {
                "number": {"type": "integer", "description": "what to add"},
                "note": {"type": "string"},
            },
            "required": ["number"],
        }
        wrong = [ToolCall("multiply", {}), ToolCall("add", {"number": "1"}), ToolCall("add", {})]
        refused = await lease.step(Action("", wrong))
        replies = [message["content"] for message in refused.messages]
        assert "Unknown function 'multiply'" in replies[0]
        assert "number is '1', not integer" in replies[1]
        assert "missing ['number']" in replies[2]
        won = await lease.step(Action("", [ToolCall("add", {"number": 2, "note": None})]))
        assert (won.messages[0]["content"], won.reward, won.done) == ("3", 1.0, True)
        assert refused.reward == 0.0
        assert not refused.done
