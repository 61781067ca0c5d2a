"""Streams of the gateway: tokens reach unmodified clients as they are sampled, ids stay exact."""

import asyncio
import json
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

from tests.server.gateways import (
    QUESTION,
    TOOL,
    GatewayBench,
    bisecting,
    play_chat,
    play_messages,
    play_responses,
)
from tests.server.test_gateway import client_of
from verl.server.answers import ChatChunk, ChatChunkChoice, ChatDelta
from verl.server.dialects import text_pieces
from verl.server.runs import Event, Run
from verl.server.session import SampledDeltas
from verl.workers.rollout.base import TokenDelta, TokenOutput

USER = {"role": "user", "content": QUESTION}
DELTA = TokenDelta(
    sample=0, token_ids=(7,), log_probs=(-0.5,), policy_versions=(0,), stop_reason=""
)
WORDS = "It was a dark and stormy night."


def chat_texts(session, **fields):
    stated = {"model": "gpt-9", "messages": [USER], "stream": True, **fields}
    with client_of("openai", session) as client:
        for chunk in client.chat.completions.create(**stated):
            yield from (choice.delta.content for choice in chunk.choices)


def responses_texts(session):
    with client_of("openai", session) as client:
        for event in client.responses.create(model="gpt-9", input=QUESTION, stream=True):
            if event.type == "response.output_text.delta":
                yield event.delta


def messages_texts(session):
    with client_of("anthropic", session) as client:
        stated = {"model": "claude-9", "max_tokens": 100, "messages": [USER]}
        with client.messages.stream(**stated) as stream:
            yield from stream.text_stream


READERS = {"chat": chat_texts, "responses": responses_texts, "messages": messages_texts}


@pytest.mark.parametrize("name", READERS)
def test_words_come_while_the_turn_is_sampled(name):
    """The engine does not go on before the client has read what came before."""
    has_read = threading.Event()

    def hold(number):
        return number >= 6 and not has_read.is_set()

    with GatewayBench(lambda prompt: WORDS, per_delta=1, hold=hold) as bench:
        session = bench.open()
        found = ""
        for text in READERS[name](session):
            found += text or ""
            if len(found) >= 4 and not has_read.is_set():
                assert not session.tree.turns, "the turn has not ended"
                has_read.set()
        assert found == WORDS
        rows = bench.end(session)
        assert len(rows) == 1
        bench.check_rows(rows)


PLAYERS = {
    "chat": ("openai", partial(play_chat, is_streamed=True)),
    "responses": ("openai", partial(play_responses, is_streamed=True)),
    "messages": ("anthropic", partial(play_messages, is_streamed=True)),
}


@pytest.mark.parametrize("name", PLAYERS)
def test_a_game_in_single_tokens_is_one_row_of_the_engines_ids(name):
    library, play = PLAYERS[name]
    with GatewayBench(bisecting, per_delta=1) as bench:
        session = bench.open()
        with client_of(library, session) as client:
            assert play(client, 11) == "The number is 11."
        rows = bench.end(session)
        assert len(rows) == 1
        assert not session.tree.forks
        bench.check_rows(rows)


def test_what_was_sent_stays_true_when_the_engine_is_lost():
    """The turn is sampled again with its seed; the stream goes on where it was."""
    with GatewayBench(lambda prompt: WORDS, per_delta=1, lose_after=5) as bench:
        bench.gateway.manager.fleet._recover = lambda engine: None
        session = bench.open()
        assert "".join(text or "" for text in chat_texts(session)) == WORDS
        (row,) = bench.end(session)
        assert len(bench.engine.requests) == 2
        assert sum(row.response_mask) == len(bench.engine.reply(bench.engine.requests[0]))
        assert session.fault is None


def test_a_stream_that_cannot_be_kept_true_ends_with_an_error():
    said = iter([WORDS, "Something else."])
    with GatewayBench(lambda prompt: next(said), per_delta=1, lose_after=5) as bench:
        bench.gateway.manager.fleet._recover = lambda engine: None
        session = bench.open()
        with pytest.raises(Exception, match="the engine was lost"):
            list(chat_texts(session))
        assert session.fault is not None, "which is no fault of the program"
        assert not bench.end(session)


def test_a_client_that_leaves_in_the_middle_leaves_no_turn():
    with GatewayBench(lambda prompt: WORDS, per_delta=1, hold=lambda number: number > 6) as bench:
        session = bench.open()
        with client_of("openai", session) as client:
            stated = {"model": "gpt-9", "messages": [USER], "stream": True}
            stream = client.chat.completions.create(**stated)
            next(iter(stream))
            stream.close()
        give_up = time.monotonic() + 60.0
        while (bench.engine.running or session.calls) and time.monotonic() < give_up:
            time.sleep(0.01)
        assert not bench.engine.running, "the engine does not sample for nobody"
        assert not session.tree.turns
        assert session.calls == []
        assert not bench.end(session)


def test_samples_of_a_stream_are_told_apart():
    with GatewayBench(bisecting, per_delta=2) as bench:
        session = bench.open()
        calls = {}
        with client_of("openai", session) as client:
            stated = {"model": "gpt-9", "messages": [USER], "tools": [TOOL], "n": 2}
            events = client.chat.completions.create(
                **stated, stream=True, stream_options={"include_usage": True}
            )
            for event in events:
                usage = event.usage
                for choice in event.choices:
                    for call in choice.delta.tool_calls or ():
                        calls.setdefault(choice.index, []).append(call)
        assert {index: len(found) for index, found in calls.items()} == {0: 1, 1: 1}
        assert calls[0][0].id != calls[1][0].id
        assert json.loads(calls[1][0].function.arguments) == {"n": 8}
        rows = bench.end(session)
        assert usage.completion_tokens == sum(sum(row.response_mask) for row in rows)


async def test_blank_text_before_a_call_is_no_text():
    class Growing:
        def __init__(self, texts, calls):
            self.texts, self.calls = texts, calls

        async def chunks(self):
            for text in self.texts:
                choice = ChatChunkChoice(index=0, delta=ChatDelta(content=text))
                yield ChatChunk(id="1", created=0, model="m", choices=[choice])

        def completion(self):
            message = SimpleNamespace(tool_calls=self.calls)
            return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    async def pieces(texts, calls):
        return [piece async for piece in text_pieces(Growing(texts, calls))]

    assert await pieces(["\n", " "], ["call"]) == [""]
    assert await pieces(["\n", " "], None) == ["", "\n "]
    assert await pieces(["\n", "a", "b"], ["call"]) == ["", "\na", "b"]


@pytest.mark.parametrize("num_ticks", range(6))
@pytest.mark.parametrize("kind", ["run", "session"])
def test_leaving_at_the_moment_at_which_tokens_come_is_leaving(kind, num_ticks):
    """`asyncio.wait_for` of Python 3.11 would give the tokens and forget that the client left."""

    async def leave():
        if kind == "run":
            waits = Run(None, [None], None, is_streamed=True, seconds=60.0)
            waits._deadline = asyncio.get_running_loop().time() + 60.0
            came = Event(0, DELTA)
        else:
            session = SimpleNamespace(request_seconds=60.0)
            waits = SampledDeltas(SimpleNamespace(session=session, places=[None], outputs=[]))
            waits._job.outputs.append(TokenOutput())
            came = DELTA
        reading = asyncio.create_task(waits.next())
        await asyncio.sleep(0.001)
        waits._send.send_nowait(came)
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        is_asked_to_leave = reading.cancel()
        await asyncio.wait({reading})
        assert reading.cancelled() == is_asked_to_leave
        waits._send.close()
        waits._receive.close()

    asyncio.run(leave())
