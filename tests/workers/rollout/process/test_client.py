"""One engine in a process of its own, where only torch can be imported: tokens, aborts, weights."""

import asyncio
import threading
from dataclasses import replace

import pytest
import torch

from tests.workers.rollout.process.counting import REFUSED, expected_log_prob
from tests.workers.rollout.process.helpers import counting_spec, counting_weights, request, started
from verl.workers.rollout.base import EngineLostError, SamplingParams
from verl.workers.rollout.process import client
from verl.workers.rollout.process.client import EngineProcess, EngineSpec, EngineStartError
from verl.workers.rollout.process.messages import EngineStateError, request_fields, request_of
from verl.workers.rollout.process.wire import decode, encode
from verl.workers.weight_sync import WeightSender, WeightsNotReadyError, WeightSyncError
from verl.workers.weight_sync.bucket import (
    ChannelError,
    DamagedBucketError,
    LostBucketError,
    RepeatedBucketError,
    StaleBucketError,
)
from verl.workers.weight_sync.tcp import TcpSender

LONG = 100_000
"""More tokens than any test waits for."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = started(counting_spec(tmp_path_factory.mktemp("engine"), sync_seconds=20.0))
    yield engine
    engine.close()


@pytest.fixture
def ready(engine):
    engine.update_weights(counting_weights(1000), version=5)
    return engine


def test_a_batch_comes_back_in_the_order_of_the_requests(ready):
    requests = [request([n], max_tokens=1 + n % 3, num_samples=1 + n % 2) for n in range(20)]
    answers = ready.generate_batch(requests)
    for asked, samples in zip(requests, answers, strict=True):
        (first,) = asked.prompt_ids
        count = asked.params.max_tokens
        for sample, output in enumerate(samples):
            assert output.token_ids == [1000 + first + sample + i for i in range(count)]
            assert output.log_probs == [expected_log_prob(i) for i in range(count)]
            assert output.policy_versions == [5] * count
            assert output.stop_reason == "length"


async def test_deltas_of_a_stream_add_up_to_what_generate_gives(ready):
    asked = request([7], max_tokens=9, num_samples=3)
    outputs = await ready.generate(asked)
    tokens, log_probs, reasons = [[], [], []], [[], [], []], ["", "", ""]
    num_deltas = 0
    async for delta in ready.stream(asked):
        tokens[delta.sample] += delta.token_ids
        log_probs[delta.sample] += delta.log_probs
        reasons[delta.sample] = delta.stop_reason
        num_deltas += 1
    assert tokens == [output.token_ids for output in outputs]
    assert log_probs == [output.log_probs for output in outputs]
    assert reasons == ["length"] * 3
    assert num_deltas == 27


async def test_callers_that_come_and_go_get_their_own_tokens(ready):
    async def ask(number):
        await asyncio.sleep(0.001 * (number % 5))
        (output,) = await ready.generate(request([number], max_tokens=1 + number % 7))
        return output.token_ids[0]

    async def give_up(number):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ready.generate(request([number], max_tokens=LONG)), 0.05)

    answers, _ = await asyncio.gather(
        asyncio.gather(*(ask(number) for number in range(200))),
        asyncio.gather(*(give_up(number) for number in range(20))),
    )
    assert answers == [1000 + number for number in range(200)]
    ready.sleep()  # refused if one of those who gave up were still running
    ready.wake_up()


async def test_an_aborted_request_ends_with_what_it_has(ready):
    task = asyncio.create_task(
        ready.generate(request([1], max_tokens=LONG, request_id="long", num_samples=2))
    )
    bystander = asyncio.create_task(ready.generate(request([2], max_tokens=50)))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(ready.abort, "long")
    outputs = await asyncio.wait_for(task, 60)
    assert [output.stop_reason for output in outputs] == ["abort", "abort"]
    assert outputs[0].token_ids == [1001 + i for i in range(len(outputs[0].token_ids))]
    assert len((await bystander)[0].token_ids) == 50
    ready.abort("unknown")


async def test_who_stops_listening_to_a_stream_ends_its_request(ready):
    stream = ready.stream(request([1], max_tokens=LONG))
    assert (await anext(stream)).token_ids == (1001,)
    await stream.aclose()
    ready.sleep()
    ready.wake_up()


async def test_a_refused_request_names_its_reason_and_leaves_the_rest(ready):
    with pytest.raises(ValueError, match=f"request bad has token {REFUSED}"):
        await ready.generate(request([REFUSED], request_id="bad"))
    with pytest.raises(ValueError, match=f"has token {REFUSED}"):
        ready.generate_batch([request([1], max_tokens=LONG), request([REFUSED])])
    with pytest.raises(ValueError, match=f"has token {REFUSED}"):
        async for _ in ready.stream(request([REFUSED])):
            pass
    assert ready.generate_batch([request([1], max_tokens=1)])[0][0].token_ids == [1001]
    ready.sleep()
    ready.wake_up()


def test_every_field_of_a_request_arrives():
    params = SamplingParams(
        temperature=0.3, top_k=4, top_p=0.9, min_p=0.01, repetition_penalty=1.1, max_tokens=7,
        stop=("a", "b"), stop_token_ids=(3, 4), ignore_eos=True, seed=2**60,
    )  # fmt: skip
    asked = replace(
        request([1, 2], num_samples=2), params=params, seeds=(8, 9), session_ids=("x", "y")
    )
    assert request_of(decode(encode(request_fields(asked)))) == asked


async def test_sleep_and_new_weights_are_refused_while_requests_run(ready):
    stream = ready.stream(request([1], max_tokens=LONG, request_id="runs"))
    await anext(stream)
    with pytest.raises(EngineStateError, match="new weights came while 1 requests run"):
        ready.update_weights(counting_weights(1), version=6)
    with pytest.raises(EngineStateError, match="sleep came while 1 requests run"):
        ready.sleep()
    assert ready.policy_version == 5
    ready.abort("runs")
    ready.update_weights(counting_weights(1), version=6)  # waits for the aborted one to end
    deltas = [delta async for delta in stream]
    assert deltas[-1].stop_reason == "abort"
    assert {version for delta in deltas for version in delta.policy_versions} == {5}


async def test_weights_in_flight_replace_those_of_requests_that_run(ready):
    stream = ready.stream(request([1], max_tokens=LONG, request_id="runs"))
    deltas = [await anext(stream)]
    for value in (100_000, 200_000, 300_000):
        held = ready.update_weights(counting_weights(value), version=value, in_flight=True)
        assert (held.version, ready.policy_version) == (value, value)
        assert ready.stall_seconds > 0
        while deltas[-1].policy_versions != (value,):
            deltas.append(await anext(stream))
    ready.abort("runs")
    deltas += [delta async for delta in stream]
    tokens = [token for delta in deltas for token in delta.token_ids]
    versions = [version for delta in deltas for version in delta.policy_versions]
    assert len(set(versions)) == 4
    for index, (token, version) in enumerate(zip(tokens, versions, strict=True)):
        assert token == 1 + index + (1000 if version == 5 else version)
    ready.sleep()  # refused if any were left
    ready.wake_up()


async def test_after_a_broken_update_in_flight_requests_wait_for_a_whole_one(ready):
    stream = ready.stream(request([1], max_tokens=LONG, request_id="runs"))
    last = await anext(stream)

    def broken():
        yield "first", torch.zeros(3)
        raise RuntimeError("the trainer fell over")

    with pytest.raises(RuntimeError, match="fell over"):
        ready.update_weights(broken(), version=6, in_flight=True)
    with pytest.raises(WeightsNotReadyError):
        ready.generate_batch([request([1])])
    ready.update_weights(counting_weights(100_000), version=7, in_flight=True)
    while last.policy_versions == (5,):  # what had been sent before
        last = await anext(stream)
    assert last.policy_versions == (7,)
    assert last.token_ids[0] > 100_000
    await stream.aclose()


def test_an_engine_that_cannot_pause_refuses_weights_in_flight(tmp_path):
    engine = started(counting_spec(tmp_path, {"can_pause": False}), version=1)
    with pytest.raises(EngineStateError, match="counting cannot take new weights while requests"):
        engine.update_weights(counting_weights(2), version=2, in_flight=True)
    assert engine.policy_version == 1
    engine.close()


def test_an_engine_that_sleeps_refuses_requests_until_it_is_woken(ready):
    ready.sleep()
    with pytest.raises(EngineStateError, match="call wake_up"):
        ready.generate_batch([request([1])])
    ready.wake_up()
    assert len(ready.generate_batch([request([1])])) == 1


def test_weights_given_back_in_sleep_must_be_sent_again(ready):
    ready.sleep(level=2)
    ready.wake_up()
    assert_serves_nothing(ready)
    ready.update_weights(counting_weights(4), version=5)
    assert ready.generate_batch([request([1], max_tokens=1)])[0][0].token_ids == [5]


def assert_serves_nothing(engine):
    with pytest.raises(WeightsNotReadyError):
        engine.generate_batch([request([1])])
    with pytest.raises(WeightsNotReadyError):
        _ = engine.policy_version


# ---- weights ---------------------------------------------------------------------------------


def test_each_update_takes_effect_and_an_earlier_version_may_follow(engine):
    for version, value in ((1, 10), (2, 20), (7, 70), (3, 30)):
        published = engine.update_weights(counting_weights(value), version)
        assert published.version == engine.policy_version == version
        ((output,),) = engine.generate_batch([request([1], max_tokens=1)])
        assert output.token_ids == [value + 1]
        assert output.policy_versions == [version]


def test_a_source_that_fails_midway_leaves_an_engine_that_serves_nothing(ready):
    def failing():
        yield "first", torch.zeros(100)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        ready.update_weights(failing(), version=6)
    assert_serves_nothing(ready)
    ready.update_weights(counting_weights(6), version=6)
    assert ready.policy_version == 6


def send_over_tcp(engine, change, timeout_seconds=20.0):
    """One update with `change` applied to its list of buckets; what the engine says of it."""
    host, port = engine.accept_weights("token", "127.0.0.1")
    assert_serves_nothing(engine)
    said = []

    def receive():
        try:
            said.append(engine.receive_weights())
        except WeightSyncError as error:
            said.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    channel = TcpSender([(host, port)], "token", timeout_seconds=timeout_seconds)
    sender = WeightSender(bucket_bytes=64)
    buckets = [
        replace(bucket, payload=bucket.payload.clone())
        for bucket in sender.buckets(counting_weights(30), version=3)
    ]
    try:
        for bucket in change(buckets):
            channel.send(bucket)
        held = channel.confirmations()
    finally:
        channel.close()
        thread.join(timeout=60)
    return held, said[0]


def test_weights_come_straight_over_tcp(engine):
    (held,), said = send_over_tcp(engine, lambda buckets: buckets)
    assert held == said
    assert engine.policy_version == 3
    assert engine.generate_batch([request([1], max_tokens=1)])[0][0].token_ids == [31]


def damaged(buckets):
    buckets[2].payload[3] ^= 1
    return buckets


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (damaged, DamagedBucketError),
        (lambda buckets: buckets[:2] + buckets[3:], LostBucketError),
        (lambda buckets: buckets[1:], LostBucketError),
        (lambda buckets: [*buckets[:2], buckets[1], *buckets[2:]], RepeatedBucketError),
        (lambda b: [b[0], replace(b[1], version=2).sealed(), *b[1:]], StaleBucketError),
        (lambda b: [replace(b[0], attempt=0).sealed(), *b], StaleBucketError),
    ],
)
def test_a_faulty_update_leaves_an_engine_that_serves_nothing(ready, change, error):
    held, said = send_over_tcp(ready, change)
    assert held == [None]
    assert isinstance(said, error), said
    assert_serves_nothing(ready)


def test_a_sender_that_leaves_midway_leaves_an_engine_that_serves_nothing(ready):
    with pytest.raises(ChannelError):
        send_over_tcp(ready, lambda buckets: buckets[:2], timeout_seconds=0.5)
    assert_serves_nothing(ready)


def test_weights_must_be_announced(ready):
    with pytest.raises(EngineStateError, match="without accept_weights"):
        ready.receive_weights()
    assert ready.policy_version == 5


def test_a_port_that_cannot_be_opened_is_named_and_changes_nothing(ready):
    with pytest.raises(ChannelError, match=r"203\.0\.113\.7"):
        ready.accept_weights("token", "203.0.113.7")
    assert ready.policy_version == 5
    assert ready.generate_batch([request([1], max_tokens=1)])[0][0].policy_versions == [5]


def test_waiting_for_weights_must_not_look_like_being_stuck():
    with pytest.raises(ValueError, match="must be less than work_seconds"):
        EngineSpec(build="a:b", options={}, work_seconds=60.0)


# ---- starting and ending -----------------------------------------------------------------------


def test_an_interpreter_that_does_not_exist_is_named():
    engine = EngineProcess(EngineSpec(build="a:b", options={}, python="/no/such/python"))
    with pytest.raises(EngineStartError, match="/no/such/python"):
        engine.start()
    with pytest.raises(EngineLostError, match="not running"):
        engine.generate_batch([request([1])])
    engine.close()


def test_an_interpreter_that_is_none_is_shown_with_what_it_wrote():
    engine = EngineProcess(EngineSpec(build="a:b", options={}, python="/bin/ls"))
    with pytest.raises(EngineStartError, match=r"exit code 2.*(\n.*)*ls: "):
        engine.start()
    engine.close()


def test_an_engine_that_cannot_be_built_is_shown_with_its_traceback(tmp_path):
    engine = EngineProcess(counting_spec(tmp_path, {"break": True}))
    with pytest.raises(EngineStartError, match="no such model"):
        engine.start()
    assert not engine.is_alive()
    engine.close()


def test_options_that_the_engine_refuses_are_a_value_error(tmp_path):
    engine = EngineProcess(counting_spec(tmp_path, {"refuse": True}))
    with pytest.raises(ValueError, match="unknown option 'refuse'"):
        engine.start()
    engine.close()


def test_weights_from_disk_are_version_0_and_a_closed_engine_is_lost(tmp_path, caplog):
    engine = started(counting_spec(tmp_path, has_weights=True))
    assert engine.policy_version == 0
    assert engine.generate_batch([request([1], max_tokens=1)])[0][0].policy_versions == [0]
    engine.close()
    engine.close()
    assert not caplog.records  # a loss is worth a warning, an end that was asked for is not
    assert not engine.is_alive()
    with pytest.raises(EngineLostError):
        engine.generate_batch([request([1])])
    engine.abort("r")
    engine.close_session("s")


def test_before_an_engine_wakes_torch_gives_back_what_it_keeps_here_once(ready, monkeypatch):
    calls = []
    monkeypatch.setattr(client, "free_cached_memory", lambda: calls.append(ready.is_alive()))
    ready.sleep()
    assert calls == []
    ready.wake_up()
    assert calls == [True]
    ready.wake_up()
    assert calls == [True], "an engine that is awake has its memory"
