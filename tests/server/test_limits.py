"""What one request may ask for, and what happens to those who come when all places are taken."""

import json
import threading

import pytest

from tests.pace import pace
from tests.server.clients import call, chat, complete
from tests.server.engines import MODEL, TOKEN, ScriptedRollout, byte_tokenizer, saying
from verl.server import ServerOptions, serve
from verl.server.errors import ApiError
from verl.server.schemas import MAX_VALUES, ChatRequest, check_size, most_keys, outside_texts

USER = {"role": "user", "content": "hello"}
TOO_MUCH = {
    "n": 10**9,
    "max_tokens": 10**9,
    "temperature": 1e-300,
    "top_p": 0,
    "top_k": -2,
    "min_p": 2,
    "repetition_penalty": 1e300,
    "seed": -1,
    "stop": ["a"] * 17,
    "stop_token_ids": list(range(1000)),
    "logprobs": 5,
    "frequency_penalty": 1.0,
    "logit_bias": {"5": 1},
    "best_of": 2,
    "echo": True,
    "suffix": "x",
    "guided_regex": "(a+)+$",
    "chat_template": "{{ 1 }}",
    "unknown": 1,
    "stream": 1,
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_field_beyond_its_limit_is_named_and_refused(plain_server, name):
    status, answer = complete(plain_server, **{name: TOO_MUCH[name]})
    assert status == 400
    assert answer["error"]["param"].startswith(name)
    assert name in answer["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 5, "logprobs": True},
        {"chat_template": "{% for x in range(10**9) %}{% endfor %}"},
        {"chat_template_kwargs": {"x": 1}},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"messages": []},
        {"messages": [USER] * 2000},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"tools": [{"type": "function", "function": {"name": "bad name"}}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}] * 200},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_a_conversation_cannot_have_is_refused(plain_server, fields):
    status, answer = chat(plain_server, **fields)
    assert status == 400
    assert answer["error"]["param"].startswith(next(iter(fields)))


def test_the_refusal_of_other_tokens_log_probabilities_gives_the_reason(plain_server):
    _, answer = chat(plain_server, logprobs=True, top_logprobs=5)
    assert "only the drawn token's" in answer["error"]["message"]


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], "", ["a"] * 129, [[5]] * 129, ["a", 5], [5, "a"], [5, -1], [5, 10**6], [5, 261], {}],
    ids=str,
)
def test_prompts_that_cannot_be_continued_are_refused(plain_server, prompt):
    status, answer = complete(plain_server, prompt=prompt)
    assert status == 400
    assert answer["error"]["param"].startswith("prompt")


def unknown_keys(count: int) -> bytes:
    return b",".join(b'"k%d":1' % number for number in range(count))


OVERSIZED = {
    "prompts": json.dumps({"prompt": ["a"] * 10**6}).encode(),
    "token ids": json.dumps({"prompt": [5] * (10**6 + 10**5)}).encode(),
    "lists": json.dumps({"prompt": [[5]] * 10**6}).encode(),
    "nulls": json.dumps({"prompt": [None] * 10**6}).encode(),
    "unknown keys": b"{%b}" % unknown_keys(600_000),
    "unknown keys of a message": b'{"messages":[{"role":"user",%b}]}' % unknown_keys(100_000),
    "unknown keys of a schema": b'{"tools":[{"function":{"parameters":{%b}}}]}'
    % unknown_keys(2000),
    "unknown keys, nested": b'{"zz":' * 100 + b"{%b}" % unknown_keys(100_000) + b"}" * 100,
    "values of an unknown key": b'{"zz":[%b1]}' % (b"1," * 3_900_000),
    "unknown parts": b'{"messages":[{"content":[%b{}]}]}' % (b'{"type":"x"},' * 300_000),
    "quotes": b'"' * 8_000_000,
    "colons": b":" * 8_000_000,
}


@pytest.mark.parametrize("kind", OVERSIZED)
def test_a_body_of_too_many_parts_is_refused_by_their_number_alone(plain_server, kind, monkeypatch):
    """Counting is cheap; what a schema, or the list of its errors, makes of them is not."""
    monkeypatch.setattr(
        ChatRequest, "model_validate_json", lambda body: pytest.fail("validated before counted")
    )
    status, _, answer = call(plain_server, "/v1/chat/completions", OVERSIZED[kind])
    assert status == 400
    assert json.loads(answer)["error"]["code"] == "too_many_parts"
    assert len(answer) < 1000


def test_arguments_of_calls_are_counted_together(plain_server):
    calls = [
        {"id": str(n), "type": "function", "function": {"name": "f", "arguments": "[1" + ",1" * n}}
        for n in (10, 7000, 150_000, 150_000)
    ]
    message = {"role": "assistant", "tool_calls": calls[:3]}
    assert chat(plain_server, messages=[USER, message])[0] == 200
    status, answer = chat(plain_server, messages=[USER, {**message, "tool_calls": calls}])
    assert (status, answer["error"]["code"]) == (400, "too_many_parts")


def test_large_bodies_are_parsed_beside_the_event_loop(plain_server, monkeypatch):
    seen = []

    def validate(body):
        seen.append(threading.current_thread().name.partition("_")[0])
        raise ApiError(400, "seen")

    monkeypatch.setattr(ChatRequest, "model_validate_json", validate)
    chat(plain_server)
    chat(plain_server, messages=[{"role": "user", "content": "a" * 20_000}])
    assert seen == ["server", "parser"]


def test_a_body_of_a_million_commas_that_are_text_is_taken(plain_server):
    text = ',{"\\:' * 1000 + "[" * 100_000 + "," * 1_000_000
    status, answer = complete(plain_server, prompt=text)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_punctuation_in_a_text_is_not_counted():
    text = json.dumps({"prompt": '["\\:' * 100_000, "n": [{"a": 1}, {"a": 1, "b": 2}]}).encode()
    assert check_size(text, MAX_VALUES) == 7  # four lists and objects, three commas
    assert most_keys(outside_texts(text, 9)) == 2
    with pytest.raises(ApiError, match="100001 lists and objects; it may have 65536"):
        check_size(json.dumps([[]] * 100_000).encode(), MAX_VALUES)
    with pytest.raises(ApiError, match="an object with 2000 keys; it may have 1024"):
        check_size(b'{"a":{%b}}' % (unknown_keys(2000) + b" " * 20_000), MAX_VALUES)


def test_a_prompt_longer_than_the_model_takes_is_refused_before_it_is_tokenized(plain_server):
    for prompt in ("a" * 4_000_000, "^" * 4_000_000, "a" * 3000, [5] * 3000):
        status, answer = complete(plain_server, prompt=prompt)
        assert status == 400
        assert answer["error"]["code"] == "context_length_exceeded"


def test_a_response_is_as_long_as_there_is_room_for(plain_server):
    engine = plain_server.service.fleet.engines[0]
    complete(plain_server, prompt=[80] * 2040, max_tokens=1000)
    assert engine.requests[-1].params.max_tokens == 8
    complete(plain_server, prompt=[80] * 2040)
    assert engine.requests[-1].params.max_tokens == 8
    complete(plain_server, prompt=[80] * 40)
    assert engine.requests[-1].params.max_tokens == 16
    chat(plain_server)
    assert engine.requests[-1].params.max_tokens == 2048 - len(engine.requests[-1].prompt_ids)
    chat(plain_server, max_tokens=9, max_completion_tokens=7)
    assert engine.requests[-1].params.max_tokens == 7


def test_special_tokens_in_a_message_are_words(plain_server):
    engine = plain_server.service.fleet.engines[0]
    chat(plain_server, messages=[{"role": "user", "content": "a<|im_end|>b"}])
    ids = list(engine.requests[-1].prompt_ids)
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(ids).count("<|im_end|>") == 2
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1


def test_past_the_queue_requests_are_told_to_come_back():
    answers = []
    engine = ScriptedRollout(saying("hello"), hold=lambda number: len(answers) < 7)
    options = ServerOptions(
        model=MODEL, max_model_len=64, token=TOKEN, max_running=2, max_waiting=3
    )
    with serve([engine], byte_tokenizer(), options) as server:
        body = {"model": MODEL, "prompt": "x"}

        def ask():
            answers.append(call(server, "/v1/completions", body))

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        refused = [headers for status, headers, _ in answers if status == 429]
        assert len(refused) == 7
        assert all(int(headers["retry-after"]) >= 1 for headers in refused)
        assert sum(status == 200 for status, _, _ in answers) == 5
        assert server.service.admission.num_running == 0
        assert server.service.admission.num_waiting == 0


def test_an_answer_that_takes_too_long_ends_with_a_typed_error():
    engine = ScriptedRollout(saying("hello"), hold=lambda number: number >= 2)
    limit = 1.5 * pace()
    options = ServerOptions(model=MODEL, max_model_len=64, token=TOKEN, request_seconds=limit)
    with serve([engine], byte_tokenizer(), options) as server:
        status, answer = complete(server)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        body = {"model": MODEL, "prompt": "x", "stream": True}
        status, _, text = call(server, "/v1/completions", body)
        *events, last = [line for line in text.decode().split("\n\n") if line]
        assert status == 200
        assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events) == "he"
        assert json.loads(last[6:])["error"]["code"] == "timeout"
        assert not engine.running
