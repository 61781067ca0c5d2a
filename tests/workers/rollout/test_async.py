"""Many callers await one engine; they come, go away and are told when something breaks."""

import asyncio
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.tiny_models import tiny_model
from tests.workers.rollout.helpers import LIMITS, assert_nothing_is_left, build_engine, request
from verl.workers.rollout.base import SamplingParams, TokenOutput

ROOMY = replace(LIMITS, max_response_tokens=64)


def requests(count, max_tokens=10):
    return [
        request(
            [3 + number % 90, 7],
            SamplingParams(seed=number, max_tokens=1 + number % max_tokens),
            str(number),
            num_samples=1 + number % 3,
        )
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", scale=0.1)


def ids(outputs):
    return [output.token_ids for output in outputs]


async def test_a_hundred_callers_get_what_the_batch_call_gives(model):
    expected = build_engine(model).generate_batch(requests(100))
    engine = build_engine(model)

    async def later(number, r):
        for _ in range(number % 7):
            await asyncio.sleep(0)
        return await engine.generate(r)

    outputs = await asyncio.gather(*(later(i, r) for i, r in enumerate(requests(100))))
    assert [ids(o) for o in outputs] == [ids(o) for o in expected]
    assert_nothing_is_left(engine)


class Slow:
    """Lets every step of an engine wait until it may begin."""

    def __init__(self, engine):
        self.num_steps = 0
        self._may_step = threading.Semaphore(0)
        self._step, engine.core.step = engine.core.step, self

    def __call__(self):
        assert self._may_step.acquire(timeout=60)
        self.num_steps += 1
        self._step()

    def allow(self, num_steps):
        self._may_step.release(num_steps)


async def test_a_coroutine_never_waits_for_a_step(model):
    engine = build_engine(model)
    slow = Slow(engine)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    tasks = [asyncio.create_task(engine.generate(request([5], params, str(i)))) for i in range(3)]
    for _ in range(100):  # the step cannot end before these turns have
        await asyncio.sleep(0)
    assert slow.num_steps == 0
    slow.allow(100)
    assert [len(output.token_ids) for (output,) in await asyncio.gather(*tasks)] == [16] * 3


async def test_a_stream_gives_tokens_between_steps_and_all_of_them_in_the_end(model):
    params = SamplingParams(seed=4, max_tokens=40, ignore_eos=True)
    wanted = request([5, 6], params, "streamed", num_samples=2)
    (expected,) = build_engine(model, limits=ROOMY).generate_batch([wanted])
    engine = build_engine(model, limits=ROOMY)
    slow = Slow(engine)
    outputs, num_deltas = [TokenOutput(), TokenOutput()], 0
    slow.allow(1)
    async for delta in engine.stream(wanted):
        outputs[delta.sample].add(delta)
        num_deltas += 1
        slow.allow(1)  # no step is made before the tokens of the last one are here
    assert ids(outputs) == ids(expected)
    assert [output.log_probs for output in outputs] == [output.log_probs for output in expected]
    assert [output.policy_versions for output in outputs] == [[0] * 40] * 2
    assert num_deltas > 2
    assert_nothing_is_left(engine)


async def test_a_stream_that_is_left_ends_its_request(model):
    engine = build_engine(model, limits=ROOMY)
    params = SamplingParams(seed=4, max_tokens=60, ignore_eos=True)
    stream = engine.stream(request([5, 6], params, "left"))
    await anext(stream)
    await stream.aclose()
    await engine.generate(request([5, 6], SamplingParams(seed=4, max_tokens=1), "next"))
    assert_nothing_is_left(engine)


async def test_a_stream_is_told_when_a_step_fails(model):
    engine = build_engine(model, limits=ROOMY)

    def fail(sessions):
        raise RuntimeError("broken")

    engine.core.scheduler.admit = fail
    with pytest.raises(RuntimeError, match="was lost"):
        await anext(engine.stream(request([5], SamplingParams(max_tokens=4), "doomed")))
    assert_nothing_is_left(engine)


def test_an_event_loop_that_is_blocked_does_not_stop_decoding(model):
    engine = build_engine(model)

    async def block():
        future = engine.submit(request([5], SamplingParams(max_tokens=16, ignore_eos=True)))
        await asyncio.sleep(0)
        return future.result(timeout=60)  # as a tool that is no coroutine would

    (output,) = asyncio.run(block())
    assert len(output.token_ids) == 16


def test_requests_of_one_turn_of_the_loop_enter_in_one_step(model):
    engine = build_engine(model)
    admitted = []
    admit = engine.core.scheduler.admit
    engine.core.scheduler.admit = lambda *args: admitted.append(admit(*args)) or admitted[-1]

    async def ask():
        tasks = [asyncio.create_task(engine.generate(one)) for one in requests(4)]
        time.sleep(0.05)  # however long the turn takes
        await asyncio.gather(*tasks)

    asyncio.run(ask())
    assert len(admitted[0]) == 4
    admitted.clear()
    with engine.together():
        futures = [engine.submit(one) for one in requests(4)]
        time.sleep(0.05)
    assert all(future.result(timeout=60) for future in futures)
    assert len(admitted[0]) == 4


def test_samples_are_told_as_they_end_and_futures_resolve_at_the_end_of_a_step(model):
    engine = build_engine(model, replace(LIMITS, tokens_per_step=1))
    ended = []
    params = SamplingParams(seed=5, max_tokens=16, stop_token_ids=tuple(range(3, 20)))
    with engine.paused():
        future = engine.submit(
            request([5], params, num_samples=4),
            lambda sample, output: ended.append((sample, len(output.token_ids), future.done())),
        )
    outputs = future.result(timeout=60)
    assert sorted(sample for sample, _, _ in ended) == [0, 1, 2, 3]
    assert [length for _, length, _ in ended] == sorted(len(o.token_ids) for o in outputs)
    assert not any(was_done for _, _, was_done in ended)
    assert len({length for _, length, _ in ended}) > 1, "they ended at different times"


def test_an_error_in_on_end_is_that_of_its_request_alone(model):
    engine = build_engine(model)
    params = SamplingParams(max_tokens=4)

    def fail(sample, output):
        raise KeyError("of the caller")

    with engine.together():
        failing = engine.submit(request([5], params, "a"), fail)
        other = engine.submit(request([6], params, "b"))
    assert other.result(timeout=60)
    with pytest.raises(KeyError, match="of the caller"):
        failing.result(timeout=60)


def test_the_event_loop_is_woken_per_request_and_not_per_step(model):
    def num_handles(max_tokens):
        engine = build_engine(model)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
        asked = [request([5 + n], params, str(n), num_samples=8) for n in range(8)]
        count = 0

        async def ask():
            nonlocal count
            loop = asyncio.get_running_loop()
            for name in ("call_soon", "call_soon_threadsafe"):
                schedule = getattr(loop, name)

                def counted(*args, schedule=schedule, **kwargs):
                    nonlocal count
                    count += 1
                    return schedule(*args, **kwargs)

                setattr(loop, name, counted)
            await asyncio.gather(*(engine.generate(one) for one in asked))

        asyncio.run(ask())
        return count

    few, many = num_handles(1), num_handles(16)
    assert many <= few + 4, "four times as many steps"
    assert many <= 2 * 64, "two per sample at most"


async def test_a_session_goes_on_through_submit_and_equals_a_fresh_prefill(model):
    engine, fresh = build_engine(model, ROOMY), build_engine(model, ROOMY)
    params = SamplingParams(max_tokens=5, seed=1, ignore_eos=True)
    first = await engine.generate(
        request([5, 6, 7], params, num_samples=3, session_ids=("a", "b", "c"))
    )
    assert engine.core.num_prefilled_tokens == 3
    histories = [[5, 6, 7, *output.token_ids, 50, 51] for output in first]
    for turn in range(3):
        seeded = replace(params, seed=turn)
        outputs = await asyncio.gather(
            *(
                engine.generate(request(history, seeded, session, session_ids=(session,)))
                for session, history in zip("abc", histories, strict=True)
            )
        )
        # Of each history the tool's two tokens and the one said last are computed.
        assert engine.core.num_prefilled_tokens == 3 + 9 * (turn + 1)
        expected = fresh.generate_batch([request(history, seeded) for history in histories])
        assert [ids(o) for o in outputs] == [ids(o) for o in expected]
        for (output,), (whole,) in zip(outputs, expected, strict=True):
            assert output.log_probs == pytest.approx(whole.log_probs, abs=2e-6)
        histories = [[*h, *o.token_ids, 50, 51] for h, (o,) in zip(histories, outputs, strict=True)]
    engine.close_session("a")
    with engine.paused():
        assert len(engine.core.sessions) == 2


def test_requests_may_come_from_many_threads(model):
    expected = build_engine(model).generate_batch(requests(40))
    engine = build_engine(model)
    with ThreadPoolExecutor(8) as threads:
        outputs = list(threads.map(lambda r: engine.submit(r).result(timeout=60), requests(40)))
    assert [ids(o) for o in outputs] == [ids(o) for o in expected]
    assert_nothing_is_left(engine)


def test_a_batch_may_run_while_others_wait(model):
    expected = build_engine(model).generate_batch(requests(20))
    engine = build_engine(model)
    futures = [engine.submit(one) for one in requests(20)[:10]]
    outputs = engine.generate_batch(requests(20)[10:])
    outputs = [future.result(timeout=60) for future in futures] + outputs
    assert [ids(o) for o in outputs] == [ids(o) for o in expected]


def test_a_pause_lies_between_two_steps(model):
    engine = build_engine(model)
    slow = Slow(engine)
    future = engine.submit(request([5], SamplingParams(max_tokens=16, ignore_eos=True)))
    slow.allow(1)
    with engine.paused():
        before = slow.num_steps
        slow.allow(100)
        time.sleep(0.05)
        assert slow.num_steps == before < 2
        with pytest.raises(RuntimeError, match="1 requests are not finished"):
            engine.core.sleep()
    assert len(future.result(timeout=60)[0].token_ids) == 16
    engine.sleep()


def test_an_engine_that_nobody_refers_to_is_freed_with_its_thread_but_first_does_its_work(model):
    engine = build_engine(model)
    future = engine.submit(request([5], SamplingParams(max_tokens=16, ignore_eos=True)))
    thread, freed = engine._thread._thread, weakref.ref(engine)
    del engine
    assert len(future.result(timeout=60)[0].token_ids) == 16
    deadline = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert freed() is None
    assert not thread.is_alive()


def test_a_closed_engine_drops_its_requests_and_refuses_others(model):
    engine = build_engine(model)
    slow = Slow(engine)
    slow.allow(1)
    future = engine.submit(request([5], SamplingParams(max_tokens=16, ignore_eos=True)))
    while not slow.num_steps:
        time.sleep(0.001)
    slow.allow(1)  # at most one has begun meanwhile
    engine.close()
    for dropped in (future, engine.submit(request([5], SamplingParams()))):
        with pytest.raises(RuntimeError, match="the engine was closed"):
            dropped.result(timeout=60)
    assert_nothing_is_left(engine)


async def test_a_cancelled_caller_frees_its_slots_and_disturbs_nobody(model):
    everything = requests(12)
    expected = build_engine(model).generate_batch(everything)
    engine = build_engine(model)
    slow = Slow(engine)
    slow.allow(1)
    tasks = [asyncio.create_task(engine.generate(r)) for r in everything]
    while not slow.num_steps:
        await asyncio.sleep(0.001)
    for task in tasks[::2]:
        task.cancel()
    slow.allow(1000)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for number, result in enumerate(results):
        if number % 2 == 0 and isinstance(result, asyncio.CancelledError):
            continue
        assert ids(result) == ids(expected[number])
    assert any(isinstance(result, asyncio.CancelledError) for result in results)
    assert_nothing_is_left(engine)


async def test_a_deadline_of_the_caller_frees_its_slots(model):
    engine = build_engine(model)
    slow = Slow(engine)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(engine.generate(request([5], params)), timeout=0.01)
    slow.allow(1)
    assert_nothing_is_left(engine)


async def test_an_aborted_request_returns_what_it_has(model):
    engine = build_engine(model)
    slow = Slow(engine)
    slow.allow(1)
    params = SamplingParams(max_tokens=16, ignore_eos=True, seed=1)
    task = asyncio.create_task(engine.generate(request([5], params, "a", num_samples=2)))
    while not slow.num_steps:
        await asyncio.sleep(0.001)
    engine.abort("a")
    slow.allow(1)  # at most one has begun before the engine learns of it
    outputs = await task
    assert [output.stop_reason for output in outputs] == ["abort", "abort"]
    assert 0 < len(outputs[0].token_ids) < 16


async def test_a_tokenizer_that_fails_reaches_its_caller(model):
    def broken(ids):
        raise KeyError("no such token")

    engine = build_engine(model, decode_text=broken)
    with pytest.raises(RuntimeError, match="request a was lost") as caught:
        await engine.generate(request([5], SamplingParams(stop=("x",)), "a"))
    assert isinstance(caught.value.__cause__, KeyError)
    assert_nothing_is_left(engine)


def test_an_engine_serves_one_event_loop_after_another(model):
    engine = build_engine(model)
    (expected,) = build_engine(model).generate_batch(requests(1))
    for _ in range(2):
        assert ids(asyncio.run(engine.generate(requests(1)[0]))) == ids(expected)


def test_a_loop_that_ends_early_leaves_nothing_behind(model):
    engine = build_engine(model)

    async def leave_early():
        asyncio.create_task(  # noqa: RUF006
            engine.generate(request([5], SamplingParams(max_tokens=16, ignore_eos=True)))
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(leave_early())
    assert_nothing_is_left(engine)
    (expected,) = build_engine(model).generate_batch(requests(1))
    assert ids(asyncio.run(engine.generate(requests(1)[0]))) == ids(expected)
