"""Sessions of unmodified clients: what was sampled is what is trained, every fork has a reason."""

import json
import threading
from functools import partial
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.clients import call
from tests.server.gateways import (
    GUESS,
    TOOL,
    GatewayBench,
    bisecting,
    call_text,
    play_chat,
    play_messages,
    play_responses,
)

USER = {"role": "user", "content": "Guess a number from 1 to 16."}
SYSTEM = {"role": "system", "content": "You guess."}
PLAYERS = {
    "chat": ("openai", play_chat),
    "chat streamed": ("openai", partial(play_chat, is_streamed=True)),
    "responses": ("openai", play_responses),
    "responses streamed": ("openai", partial(play_responses, is_streamed=True)),
    "responses chained": ("openai", partial(play_responses, is_chained=True)),
    "messages": ("anthropic", play_messages),
    "messages streamed": ("anthropic", partial(play_messages, is_streamed=True)),
}


@pytest.fixture(scope="module")
def bench():
    with GatewayBench(bisecting) as bench:
        yield bench


@pytest.fixture
def session(bench):
    bench.engine.requests.clear()
    session = bench.open()
    yield session
    bench.run(bench.gateway.end(session))


def client_of(library: str, session: Any) -> Any:
    if library == "openai":
        url = f"{session.url}/v1"
        return import_module("openai").OpenAI(base_url=url, api_key=session.key, max_retries=0)
    anthropic = import_module("anthropic")
    return anthropic.Anthropic(base_url=session.url, api_key=session.key, max_retries=0)


@pytest.mark.parametrize("name", PLAYERS)
def test_a_game_is_one_row_of_the_engines_ids(bench, session, name):
    library, play = PLAYERS[name]
    with client_of(library, session) as client:
        assert play(client, 11) == "The number is 11."
    rows = bench.end(session)
    assert len(rows) == 1
    assert rows[0].num_turns == 2 * len(bench.engine.requests) == 10
    assert not session.tree.forks
    bench.check_rows(rows)


class Address:
    """Where a session is served, as `clients.call` needs it."""

    def __init__(self, session: Any) -> None:
        self.port = urlsplit(session.url).port


def chat(session: Any, messages: list[Any], **fields: Any) -> tuple[int, dict[str, str], Any]:
    """A request of the session without a client: status, headers and the JSON of the answer."""
    body = {"model": "any", "messages": messages, "tools": [TOOL], **fields}
    path = f"/s/{session.name}/v1/chat/completions"
    status, headers, answer = call(Address(session), path, body, token=session.key)
    return status, headers, json.loads(answer)


def said(session: Any, messages: list[Any], **fields: Any) -> dict[str, Any]:
    status, _, answer = chat(session, messages, **fields)
    assert status == 200, answer
    return answer["choices"][0]["message"]


def reply(message: dict[str, Any], text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}


def other_tools(session, history, first):
    return history, {"tools": [TOOL, {"type": "function", "function": {**GUESS, "name": "ask"}}]}


def other_arguments(session, history, first):
    function = {"name": "guess", "arguments": '{"n": 3}'}
    call = {**first["tool_calls"][0], "function": function}
    return [*history[:2], {**first, "tool_calls": [call]}, *history[3:]], {}


FORKS = {
    "branch": lambda session, history, first: (history, {}),
    "samples": lambda session, history, first: (
        [*history, said(session, history), {"role": "user", "content": "Go on."}],
        {"n": 2},
    ),
    "history_rewritten": other_arguments,
    "system_changed": lambda session, history, first: (
        [{"role": "system", "content": "You play."}, *history[1:]],
        {},
    ),
    "tools_changed": other_tools,
    "new_conversation": lambda session, history, first: ([{"role": "user", "content": "Hi"}], {}),
}


@pytest.mark.parametrize("reason", FORKS)
def test_what_cannot_be_appended_forks_with_its_reason(bench, session, reason):
    first = said(session, [SYSTEM, USER])
    history = [SYSTEM, USER, first, reply(first, "low")]
    if reason != "samples":
        said(session, history)
    messages, fields = FORKS[reason](session, history, first)
    said(session, messages, **fields)
    assert dict(session.tree.forks) == {reason: 1}
    rows = bench.end(session)
    assert len(rows) == 2
    bench.check_rows(rows)
    shared = [row.response_mask[: len(row.response_mask) // 4] for row in rows]
    assert any(shared[0])
    if reason in ("branch", "samples"):  # the first turn is in both rows and trained in the first
        assert not any(shared[1])


def test_a_template_that_cannot_go_on_forks(session, bench, monkeypatch):
    first = said(session, [SYSTEM, USER])

    def refuse(*args: Any) -> list[int]:
        raise CannotContinue("no")

    continuation = import_module("verl.utils.dataset.continuation")
    CannotContinue = continuation.CannotContinue
    monkeypatch.setattr(continuation.Continuation, "ids_after_turn", refuse)
    said(session, [SYSTEM, USER, first, reply(first, "low")])
    assert dict(session.tree.forks) == {"template_cannot_continue": 1}
    assert len(bench.end(session)) == 2


def test_clients_may_add_and_drop_fields(session):
    first = said(session, [SYSTEM, USER])
    call = first["tool_calls"][0]
    arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
    changed = {
        "role": "assistant",
        "content": "",
        "refusal": None,
        "audio": None,
        "tool_calls": [
            {**call, "index": 0, "function": {**call["function"], "arguments": arguments}}
        ],
    }
    parts = [{"type": "text", "text": USER["content"], "cache_control": {"type": "ephemeral"}}]
    user = {"role": "user", "name": "me", "content": parts}
    said(session, [SYSTEM, user, changed, reply(first, "low")])
    assert len(session.tree.turns) == 2
    assert not session.tree.forks


@pytest.mark.parametrize(("n", "forks"), [(8, {}), (9, {"history_rewritten": 1})])
def test_a_turn_may_come_back_as_text_that_quotes_its_calls(session, n, forks):
    first = said(session, [SYSTEM, USER])
    function = {"name": "guess", "arguments": {"n": n}}
    text = f"Calling tools: {[{'id': first['tool_calls'][0]['id'], 'function': function}]}"
    quoted = {"role": "assistant", "content": text}
    said(session, [SYSTEM, USER, quoted, {"role": "user", "content": "Observation: low"}])
    assert dict(session.tree.forks) == forks


def test_calls_are_read_in_the_format_of_the_model():
    written = iter(
        ['{"name": "guess", "parameters": {"n": 8}}', '{"name": "shell", "parameters": {}}']
    )
    with GatewayBench(lambda prompt: next(written), call_format="llama3_json") as bench:
        session = bench.open()
        first = said(session, [SYSTEM, USER])
        assert json.loads(first["tool_calls"][0]["function"]["arguments"]) == {"n": 8}
        second = said(session, [SYSTEM, USER, first, reply(first, "low")])
        assert "shell" in second["content"]  # a tool that was not offered is none
        assert not session.tree.forks


def test_parallel_calls_on_one_history_are_branches(bench, session):
    first = said(session, [SYSTEM, USER])
    history = [SYSTEM, USER, first, reply(first, "low")]
    threads = [threading.Thread(target=said, args=(session, history)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(session.tree.forks) == {"branch": 3}
    seeds = [request.seeds for request in bench.engine.requests[1:]]
    assert len({seed for given in seeds for seed in given}) == 4
    rows = bench.end(session)
    assert len(rows) == 4
    bench.check_rows(rows)


def test_a_program_that_runs_again_samples_with_the_same_seeds(bench):
    seeds = []
    for _ in range(2):
        bench.engine.requests.clear()
        session = bench.open()
        first = said(session, [SYSTEM, USER])
        history = [SYSTEM, USER, first, reply(first, "low")]
        said(session, history)
        said(session, history)
        said(session, [USER])
        bench.end(session)
        seeds.append([request.seeds for request in bench.engine.requests])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 4
    assert seeds[0][0] == (11,)


def test_training_decides_how_tokens_are_drawn_and_says_so(bench, session):
    status, headers, _ = chat(
        session, [USER], temperature=0, seed=5, tool_choice="required", max_tokens=7, stop=["}"]
    )
    assert status == 200
    assert headers["x-verl-ignored"] == "seed, temperature, tool_choice"
    (request,) = bench.engine.requests
    assert (request.params.temperature, request.params.top_p) == (0.7, 0.9)
    assert (request.params.max_tokens, request.params.stop) == (7, ("}",))
    assert request.seeds == (11,)


def test_a_conversation_ends_with_the_budget_of_its_trajectory():
    with GatewayBench(lambda prompt: "x" * 450, prompt_length=64, response_length=1000) as bench:
        session = bench.open()
        user = {"role": "user", "content": "a question that is longer than the prompt length" * 2}
        first = said(session, [user], tools=None)
        messages = [user, {"role": "assistant", "content": first["content"]}, user]
        status, _, answer = chat(session, messages, tools=None)
        assert answer["choices"][0]["finish_reason"] == "length"
        messages += [answer["choices"][0]["message"], user]
        status, _, answer = chat(session, messages, tools=None)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        (row,) = bench.end(session)
        assert (len(row.prompt_ids), len(row.response_ids)) == (64, 1000)
        bench_ids = [*row.prompt_ids, *row.response_ids]
        last = bench.engine.requests[-1]
        assert bench_ids[: len(last.prompt_ids)] == list(last.prompt_ids)


HOSTILE = {
    "no key": ({"token": None}, 401, "invalid_api_key"),
    "the key of another session": ({"token": "other"}, 401, "invalid_api_key"),
    "an unknown session": ({"name": "nobody"}, 401, "invalid_api_key"),
    "an unknown session, with the gateway's token": (
        {"name": "nobody", "token": "gateway"},
        404,
        "unknown_session",
    ),
    "a session that has ended": ({"name": "ended"}, 410, "session_ended"),
    "a path out of the session": ({"path": "/v1/../../v1/models"}, 404, "http"),
    "a huge body": ({"body": b"[" + b" " * (9 << 20)}, 413, "too_large"),
    "no JSON": ({"body": b"{"}, 400, "invalid_value"),
    "no object": ({"body": b"[]"}, 400, "invalid_value"),
    "nested deeply": ({"body": b"[" * 100_000 + b"]" * 100_000}, 400, "too_many_parts"),
    "many values": ({"body": b"[" + b"1," * 300_000 + b"1]"}, 400, "too_many_parts"),
    "no messages": ({"body": {"model": "any"}}, 400, "invalid_value"),
    "messages that are none": ({"messages": [7, None]}, 400, "invalid_value"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "invalid_value",
    ),
    "a reply to no call": (
        {"messages": [USER, {"role": "tool", "tool_call_id": "x", "content": "y"}]},
        400,
        "unknown_tool_call",
    ),
    "a reply without a call's id": (
        {"messages": [USER, {"role": "tool", "content": "y"}]},
        400,
        "invalid_value",
    ),
    "a reply that is a number": (
        {"messages": [USER, {"role": "tool", "tool_call_id": "x", "content": 7}]},
        400,
        "invalid_value",
    ),
    "an unknown field": ({"body": {"messages": [USER], "shell": "rm"}}, 400, "invalid_value"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_requests_get_clear_errors_and_leave_nothing(bench, session, name):
    case, status, code = HOSTILE[name]
    other = bench.open()
    bench.run(bench.gateway.end(other))
    where = {"ended": other.name}.get(case.get("name"), case.get("name", session.name))
    token = {"other": other.key, "gateway": bench.gateway.token, None: None}.get(
        case.get("token", session.key), session.key if where != other.name else other.key
    )
    body = case.get("body", {"model": "any", "messages": case.get("messages", [USER])})
    path = f"/s/{where}{case.get('path', '/v1/chat/completions')}"
    got, _, answer = call(bench.gateway, path, body, token=token)
    assert (got, json.loads(answer)["error"]["code"]) == (status, code)
    assert not session.tree.turns
    assert not bench.engine.requests
    assert said(session, [SYSTEM, USER])["tool_calls"]
    assert not session.tree.forks


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/messages", {"messages": []}, 400, "messages"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, ""),
        ("/v1/responses", {"input": [{"type": "web_search_call"}]}, 400, "web_search_call"),
        ("/v1/responses", {"input": "Hi", "previous_response_id": "x"}, 404, "no response"),
        ("/v1/responses", {"input": [{"type": "function_call_output"}]}, 400, "tool_call_id"),
    ],
)
def test_dialects_refuse_in_their_own_form(session, path, body, status, words):
    got, _, answer = call(Address(session), f"/s/{session.name}{path}", body, token=session.key)
    error = json.loads(answer)
    assert got == status
    assert words in error["error"]["message"]
    assert ("type" in error) == (path == "/v1/messages")


def test_a_session_may_be_named_in_a_header(session):
    header = {"x-verl-session": session.name}
    body = {"model": "any", "messages": [USER]}
    path = "/v1/chat/completions"
    status, _, _ = call(Address(session), path, body, token=session.key, headers=header)
    assert status == 200
    assert len(session.tree.turns) == 1


def test_a_client_that_leaves_leaves_no_turn():
    entered = threading.Event()
    gate = threading.Event()

    def slow(prompt: str) -> str:
        entered.set()
        gate.wait(60)
        return call_text(8)

    with GatewayBench(slow) as bench:
        session = bench.open()
        thread = threading.Thread(target=pytest.raises, args=(Exception, chat, session, [USER]))
        thread.start()
        assert entered.wait(60)
        bench.run(bench.gateway.end(session))
        gate.set()
        thread.join()
        assert not session.tree.turns
        assert not session.tree.outputs()
