"""Engines share the work, and the loss of one costs nobody an answer that has not begun."""

import asyncio
import json
import os
import signal
import threading

import pytest

from tests.server.clients import call, chat, complete
from tests.server.engines import (
    MODEL,
    TOKEN,
    ScriptedRollout,
    byte_tokenizer,
    engine_process,
    saying,
)
from verl.server import ServerOptions, serve
from verl.server.errors import ApiError
from verl.server.metrics import ServerMetrics
from verl.server.pool import EnginePool
from verl.server.runs import Whole
from verl.workers.rollout.base import GenerationRequest, SamplingParams

OPTIONS = ServerOptions(model=MODEL, max_model_len=2048, token=TOKEN)


def a_request(prompt: int = 80, max_tokens: int = 5, length: int = 3) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return GenerationRequest(request_id="r", prompt_ids=(prompt,) * length, params=params)


async def run_all(pool: EnginePool, *requests: GenerationRequest, key: str | None = None) -> None:
    await asyncio.gather(*(pool.run(request, Whole(), key) for request in requests))


async def test_the_engine_with_the_fewest_tokens_to_come_is_chosen():
    engines = [ScriptedRollout(saying("hello"), pause=0.01) for _ in range(3)]
    pool = EnginePool(engines, ServerMetrics())
    long, short = a_request(81, max_tokens=500), [a_request(90 + n) for n in range(8)]
    await run_all(pool, long, *short)
    assert [len(engine.requests) for engine in engines] == [1, 4, 4]
    assert [member.outstanding for member in pool.members] == [0, 0, 0]


async def test_equal_beginnings_stay_together_while_their_engine_is_about_as_free():
    engines = [ScriptedRollout(saying("hello")) for _ in range(2)]
    pool = EnginePool(engines, ServerMetrics())
    for _ in range(4):
        await run_all(pool, a_request(85))
    assert sorted(len(engine.requests) for engine in engines) == [0, 4]
    await run_all(pool, *(a_request(85, max_tokens=50) for _ in range(10)))
    assert min(len(engine.requests) for engine in engines) == 5


async def test_requests_with_one_key_stay_together():
    engines = [ScriptedRollout(saying("hello")) for _ in range(4)]
    pool = EnginePool(engines, ServerMetrics())
    for prompt in range(80, 90):
        await run_all(pool, a_request(prompt), key="talk")
    assert sorted(len(engine.requests) for engine in engines) == [0, 0, 0, 10]


async def test_an_answer_that_nobody_saw_begins_anew_elsewhere():
    broken = ScriptedRollout(saying("hello"), lose_after=3)
    sound = ScriptedRollout(saying("hello"))
    pool = EnginePool([broken, sound], ServerMetrics())
    whole = Whole()
    await pool.run(a_request(), whole)
    (delta,) = whole.deltas()
    assert byte_tokenizer().decode(delta.token_ids) == "hello"
    assert delta.stop_reason == "length"
    assert [len(broken.requests), len(sound.requests)] == [1, 1]
    assert not pool.members[0].is_alive()


async def test_without_an_engine_requests_are_told_to_come_back():
    pool = EnginePool([ScriptedRollout(saying("hello"), lose_after=0)], ServerMetrics())
    with pytest.raises(ApiError) as error:
        await pool.run(a_request(), Whole())
    assert error.value.status == 503
    assert "Retry-After" in error.value.headers


def test_a_pool_needs_an_engine():
    with pytest.raises(ValueError, match="at least one"):
        EnginePool([], ServerMetrics())


def test_a_stream_that_has_begun_ends_with_a_typed_error():
    engines = [ScriptedRollout(saying("hello"), lose_after=3), ScriptedRollout(saying("hello"))]
    with serve(engines, byte_tokenizer(), OPTIONS) as server:
        body = {"model": MODEL, "prompt": "x", "stream": True}
        status, _, text = call(server, "/v1/completions", body)
        *events, last = [event[6:] for event in text.decode().split("\n\n") if event]
        assert status == 200
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == "hel"
        error = json.loads(last)["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_lost")
        assert "0x7f00dead" not in text.decode()
        assert not engines[1].requests


def test_a_stream_that_has_not_begun_goes_to_another_engine():
    engines = [ScriptedRollout(saying("hello"), lose_after=0), ScriptedRollout(saying("hello"))]
    with serve(engines, byte_tokenizer(), OPTIONS) as server:
        body = {"model": MODEL, "prompt": "x", "stream": True}
        status, _, text = call(server, "/v1/completions", body)
        assert status == 200
        assert text.decode().endswith("data: [DONE]\n\n")
        status, _, body = call(server, "/health")
        assert json.loads(body) == {"status": "degraded", "engines": 2, "engines_alive": 1}


def test_an_engine_killed_under_load_costs_no_answer_and_comes_back(engine, model_folder):
    """The second engine's process is killed while 24 requests run, of which 12 are streams."""
    victim = engine_process(model_folder)
    victim.start()
    answers: list[tuple[int, str]] = []
    wanted = {"max_tokens": 200, "ignore_eos": True, "seed": 1}

    def ask(number: int) -> None:
        if number % 2:
            status, answer = chat(server, **wanted)
            answers.append((status, answer["choices"][0]["finish_reason"]))
        else:
            body = {"model": MODEL, "prompt": f"{number}", "stream": True, **wanted}
            status, _, text = call(server, "/v1/completions", body)
            last = text.decode().strip().split("\n\n")[-1]
            answers.append(
                (status, "DONE" if "[DONE]" in last else json.loads(last[6:])["error"]["code"])
            )

    try:
        with serve([engine, victim], byte_tokenizer(), OPTIONS) as server:
            threads = [threading.Thread(target=ask, args=(n,)) for n in range(24)]
            for thread in threads:
                thread.start()
            pause = threading.Event()
            while not server.service.pool.members[1].outstanding:
                pause.wait(0.01)
            os.kill(victim.pid, signal.SIGKILL)
            for thread in threads:
                thread.join(timeout=60)
            assert len(answers) == 24
            assert {status for status, _ in answers} == {200}
            assert {end for _, end in answers} <= {"length", "DONE", "engine_lost"}
            assert [end for _, end in answers].count("length") == 12
            for _ in range(600):
                if json.loads(call(server, "/health")[2])["engines_alive"] == 2:
                    break
                pause.wait(0.1)
            assert json.loads(call(server, "/health")[2])["status"] == "ok"
            assert complete(server)[0] == 200
            assert [member.outstanding for member in server.service.pool.members] == [0, 0]
    finally:
        victim.close()
