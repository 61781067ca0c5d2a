"""A lost engine costs no client a response that has not begun."""

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

OPTIONS = ServerOptions(model=MODEL, max_model_len=2048, token=TOKEN)


def test_a_response_as_a_whole_begins_anew_on_another_engine():
    engines = [ScriptedRollout(saying("hello"), lose_after=3), ScriptedRollout(saying("hello"))]
    with serve(engines, byte_tokenizer(), OPTIONS) as server:
        status, answer = complete(server)
        assert status == 200
        assert answer["choices"][0]["text"] == "hello"
        assert [len(engine.requests) for engine in engines] == [1, 1]
        metrics = call(server, "/metrics")[2].decode()
        assert 'verl_engine_lost_total{engine="0"} 1.0' in metrics
        assert 'verl_engine_alive{engine="1"} 1.0' in metrics
        assert 'verl_engine_outstanding_tokens{engine="1"} 0.0' in metrics
        assert "verl_redispatched_total 1.0" in metrics


def test_without_an_engine_clients_are_told_to_come_back():
    with serve([ScriptedRollout(saying("hello"), lose_after=0)], byte_tokenizer(), OPTIONS) as one:
        for _ in range(2):
            status, headers, _ = call(one, "/v1/completions", {"model": MODEL, "prompt": "x"})
            assert status == 503
            assert "retry-after" in {name.lower() for name in headers}
        assert call(one, "/health")[0] == 503


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


@pytest.mark.slow
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
            while not server.service.fleet.outstanding[1]:
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
            assert server.service.fleet.outstanding == [0, 0]
    finally:
        victim.close()
