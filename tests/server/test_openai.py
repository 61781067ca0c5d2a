"""The official client gets from the server what the engine gives, as a whole and in events."""

import json

import pytest

from tests.server.clients import call
from tests.server.engines import MODEL, TOKEN, ScriptedRollout, byte_tokenizer, saying
from verl.server import ServerOptions, serve
from verl.workers.rollout.base import GenerationRequest, SamplingParams

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
USER = {"role": "user", "content": "hello"}
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def caller(openai):
    """A client of a model that calls a tool after a few words."""
    text = (
        'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    )
    options = ServerOptions(model=MODEL, max_model_len=2048, token=TOKEN)
    with (
        serve([ScriptedRollout(saying(text), per_delta=3)], byte_tokenizer(), options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0) as client,
    ):
        yield client


def test_the_model_is_listed(client):
    (model,) = client.models.list().data
    assert (model.id, model.model_dump()["max_model_len"]) == (MODEL, 2048)


def test_tokens_and_log_probabilities_are_the_engine_s_own(client, engine):
    params = SamplingParams(temperature=0.7, max_tokens=12, seed=5)
    request = GenerationRequest(
        request_id="direct", prompt_ids=(80, 81, 82), params=params, num_samples=2
    )
    (direct,) = engine.generate_batch([request])
    answer = client.completions.create(
        model=MODEL, prompt=[80, 81, 82], temperature=0.7, max_tokens=12, seed=5, n=2, logprobs=0,
        extra_body=IDS,
    )  # fmt: skip
    for choice, output in zip(answer.choices, direct, strict=True):
        assert choice.model_dump()["token_ids"] == output.token_ids
        assert choice.logprobs.token_logprobs == pytest.approx(output.log_probs, abs=1e-6)
        assert choice.finish_reason == output.stop_reason
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == sum(len(output.token_ids) for output in direct)


def test_a_stream_adds_up_to_the_whole_answer(client):
    wanted = {"model": MODEL, "prompt": ["one", "two"], "max_tokens": 20, "seed": 1, "n": 2}
    whole = client.completions.create(**wanted, extra_body=IDS)
    texts, ids, reasons = [""] * 4, [[] for _ in range(4)], [None] * 4
    usage = None
    events = client.completions.create(
        **wanted, stream=True, stream_options={"include_usage": True}, extra_body=IDS
    )
    for event in events:
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.text
            ids[choice.index] += choice.model_dump()["token_ids"]
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert texts == [choice.text for choice in whole.choices]
    assert ids == [choice.model_dump()["token_ids"] for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def test_equal_seeds_give_equal_answers_and_other_seeds_others(client):
    def answer(seed):
        return client.chat.completions.create(
            model=MODEL, messages=[USER], max_tokens=24, seed=seed
        ).choices[0].message.content  # fmt: skip

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)


def test_a_conversation_in_events_adds_up_to_the_whole_answer(client):
    wanted = {"model": MODEL, "messages": [USER], "max_tokens": 20, "seed": 3, "logprobs": True}
    (whole,) = client.chat.completions.create(**wanted, extra_body=IDS).choices
    events = list(client.chat.completions.create(**wanted, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    assert (
        "".join(event.choices[0].delta.content or "" for event in events) == whole.message.content
    )
    log_probs = [part.logprob for e in events for part in e.choices[0].logprobs.content]
    assert log_probs == [part.logprob for part in whole.logprobs.content]
    assert len(log_probs) == len(whole.model_dump()["token_ids"])
    assert events[-1].choices[0].finish_reason == whole.finish_reason


def test_the_chat_template_s_tokens_are_what_the_model_is_given(client):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}, USER],
        max_tokens=1,
        extra_body=IDS,
    )
    text = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
    expected = byte_tokenizer()(text + "<|im_start|>assistant\n", add_special_tokens=False)
    assert answer.model_dump()["prompt_token_ids"] == expected["input_ids"]


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(client):
    whole = client.completions.create(model=MODEL, prompt="x", max_tokens=40, seed=2)
    text = whole.choices[0].text
    stop = text[10:12]
    cut = client.completions.create(model=MODEL, prompt="x", max_tokens=40, seed=2, stop=stop)
    assert cut.choices[0].text == text[: text.find(stop)]
    assert cut.choices[0].finish_reason == "stop"
    events = client.completions.create(
        model=MODEL, prompt="x", max_tokens=40, seed=2, stop=[stop], stream=True
    )
    assert "".join(event.choices[0].text for event in events) == text[: text.find(stop)]


def test_a_conversation_goes_on_in_its_session(client):
    first = client.completions.create(
        model=MODEL, prompt=[80] * 20, max_tokens=8, seed=1,
        extra_body={**IDS, "prompt_cache_key": "talk"},
    )  # fmt: skip
    longer = [80] * 20 + first.choices[0].model_dump()["token_ids"] + [81]
    kept = client.completions.create(
        model=MODEL, prompt=longer, max_tokens=8, seed=1, extra_body={"prompt_cache_key": "talk"}
    )
    fresh = client.completions.create(model=MODEL, prompt=longer, max_tokens=8, seed=1)
    assert kept.choices[0].text == fresh.choices[0].text


def test_errors_have_the_client_s_own_types(client, openai):
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=MODEL, prompt="x", max_tokens=10**9)
    wrong = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


# ---- tools ---------------------------------------------------------------------------------------


def test_tool_calls_are_taken_out_of_the_text(caller):
    answer = caller.chat.completions.create(model=MODEL, messages=[USER], tools=[TOOL])
    (choice,) = answer.choices
    (found,) = choice.message.tool_calls
    assert choice.message.content == "Let me see."
    assert (found.function.name, json.loads(found.function.arguments)) == (
        "weather",
        {"city": "Bern"},
    )
    assert choice.finish_reason == "tool_calls"


def test_tool_calls_come_whole_in_a_stream(caller):
    events = caller.chat.completions.create(
        model=MODEL, messages=[USER], tools=[TOOL], n=2, stream=True
    )
    text, calls, reasons = "", [], set()
    for event in events:
        (choice,) = event.choices
        if choice.index == 1:
            text += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            reasons.add(choice.finish_reason)
    assert text == "Let me see."
    assert [(found.index, found.function.arguments) for found in calls] == [(0, '{"city": "Bern"}')]
    assert reasons == {None, "tool_calls"}


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_without_tools_a_call_is_text(caller, fields):
    answer = caller.chat.completions.create(model=MODEL, messages=[USER], **fields)
    assert "<tool_call>" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_tools_calls_and_results_go_through_the_chat_template(caller):
    first = caller.chat.completions.create(model=MODEL, messages=[USER], tools=[TOOL])
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12 degrees"}
    second = caller.chat.completions.create(
        model=MODEL, messages=[USER, message, result], tools=[TOOL], extra_body=IDS
    )
    text = byte_tokenizer().decode(second.model_dump()["prompt_token_ids"])
    assert '"name": "weather"' in text
    assert "12 degrees" in text


# ---- what is watched -----------------------------------------------------------------------------


def test_metrics_count_requests_and_tokens(caller):
    server_url = str(caller.base_url).removesuffix("/v1/")
    before = metrics(server_url)
    caller.completions.create(model=MODEL, prompt=[80] * 7, max_tokens=5)
    after = metrics(server_url)

    def gained(name):
        return after[name] - before.get(name, 0.0)

    assert gained("verl_prompt_tokens_total") == 7
    assert gained("verl_generated_tokens_total") == 5
    assert gained('verl_requests_total{route="/v1/completions",status="200"}') == 1
    assert gained('verl_engine_requests_total{engine="0"}') == 1
    assert after['verl_engine_alive{engine="0"}'] == 1
    assert after["verl_running_requests"] == 0


def metrics(url: str) -> dict[str, float]:
    import urllib.request

    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")
    }


def test_health_counts_the_engines(server):
    status, _, body = call(server, "/health")
    assert (status, json.loads(body)) == (200, {"status": "ok", "engines": 1, "engines_alive": 1})
