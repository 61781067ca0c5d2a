"""Environments behind a protocol of somebody else's, each in an interpreter that has its package.

Point VERL_TEST_OPENENV_PYTHON at an interpreter with openenv-core.
"""

import asyncio
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.environments.test_pool import leased, pool_of
from verl.environments.base import Action
from verl.environments.pool import EnvironmentSpec
from verl.protocol.trajectory import InfraFault

OPENENV = os.environ.get("VERL_TEST_OPENENV_PYTHON")


@pytest.fixture
def openenv_server():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = str(Path(__file__).with_name("openenv_server.py"))
    process = subprocess.Popen([OPENENV, script, str(port)], stderr=subprocess.DEVNULL)
    try:
        while True:
            assert process.poll() is None, "the server has ended"
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        yield port, process
    finally:
        process.kill()
        process.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.skipif(OPENENV is None, reason="VERL_TEST_OPENENV_PYTHON is not set")
async def test_an_openenv_server_is_an_environment(openenv_server):
    port, process = openenv_server
    spec = EnvironmentSpec(
        name=f"openenv:http://127.0.0.1:{port}", kwargs={"observation_key": "hint"}
    )

    async def play(pool, seed):
        async with leased(pool) as lease:
            first, _ = await lease.reset(spec, {}, seed)
            refused = await lease.step(Action("what"))
            assert refused.info["is_refused"]
            seen, low, high = [first.text], 1, 16
            while True:
                guess = (low + high) // 2
                observation = await lease.step(Action(str(guess)))
                seen.append((guess, observation.text, observation.reward))
                if observation.done:
                    return seen
                low, high = (guess + 1, high) if observation.text == "low" else (low, guess - 1)

    async with pool_of() as pool:
        one, again, other = await asyncio.gather(*(play(pool, seed) for seed in (1, 1, 2)))
        assert one == again != other
        assert one[-1][1:] == ("win", 1.0)
        process.kill()
        process.wait(timeout=60)
        async with leased(pool) as lease:
            with pytest.raises(InfraFault, match="Cannot connect"):
                await lease.reset(spec, {}, 0)
