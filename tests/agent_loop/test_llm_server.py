"""Engines under the newer names: a balancer with a memory, and a client that asks through it."""

import asyncio

import pytest

from tests.agent_loop.fakes import FakeRollout, loop_config
from verl.workers.rollout.llm_server import (
    GlobalRequestLoadBalancer,
    LLMServerClient,
    LLMServerManager,
)


def test_a_session_stays_where_it_was_and_others_go_where_least_is_to_do():
    balancer = GlobalRequestLoadBalancer(["a", "b"])
    assert [balancer.acquire_server(name) for name in ("x", "y", "x")] == ["a", "b", "a"]
    assert balancer.get_status() == {"in_flight": {"a": 2, "b": 1}, "num_sticky": 2}
    balancer.release_server("a")
    balancer.release_server("a")
    balancer.clear_sticky_cache()
    assert balancer.acquire_server("z") == "a"


def test_servers_come_and_go():
    balancer = GlobalRequestLoadBalancer(["a"])
    balancer.acquire_server("x")
    balancer.add_servers(["b"])
    balancer.remove_servers(["a"])
    assert balancer.acquire_server("x") == "b"
    balancer.release_server("a")  # it was removed while it answered
    balancer.remove_servers(["b"])
    with pytest.raises(ValueError, match="there are no servers"):
        balancer.acquire_server("x")


def test_only_the_last_sessions_are_remembered_and_a_choice_may_be_fixed():
    balancer = GlobalRequestLoadBalancer(["a", "b"], max_cache_size=1)
    balancer.acquire_server("x")
    balancer.acquire_server("y")
    assert balancer.get_status()["num_sticky"] == 1
    fixed = [
        GlobalRequestLoadBalancer(names, full_determinism=True).acquire_server("x")
        for names in (["a", "b"], ["b", "a"])
    ]
    assert fixed[0] == fixed[1]


def test_a_client_asks_the_engine_that_the_balancer_chose():
    engines = [FakeRollout(), FakeRollout()]
    manager = LLMServerManager.create(loop_config(), rollouts=engines)
    client = manager.get_client()
    assert isinstance(client, LLMServerClient)

    async def ask(name):
        params = {"temperature": 1.0, "top_p": 1.0, "logprobs": True, "seed": 11}
        return await client.generate(name, prompt_ids=[5, 6], sampling_params=params)

    assert asyncio.run(ask("x")).token_ids == [6, 11, 2]
    asyncio.run(ask("x"))
    assert [len(engine.requests) for engine in engines] == [2, 0]
    assert manager.load_balancer.get_status()["in_flight"] == {"server_0": 0, "server_1": 0}
