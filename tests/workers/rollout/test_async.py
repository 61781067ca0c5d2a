"""Many callers await one engine; they come, go away and are told when something breaks."""

import asyncio

import pytest

from tests.tiny_models import tiny_model
from tests.workers.rollout.helpers import LIMITS, assert_nothing_is_left, build_engine, request
from verl.workers.rollout.base import SamplingParams


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


async def test_other_tasks_take_turns_with_the_engine(model):
    engine = build_engine(model)
    turns = 0

    async def count_turns():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count_turns())
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    await asyncio.gather(*(engine.generate(request([5], params, str(i))) for i in range(3)))
    counter.cancel()
    assert turns >= 16 // LIMITS.steps_per_visit


async def test_a_cancelled_caller_frees_its_slots_and_disturbs_nobody(model):
    everything = requests(12)
    expected = build_engine(model).generate_batch(everything)
    engine = build_engine(model)
    tasks = [asyncio.create_task(engine.generate(r)) for r in everything]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for number, result in enumerate(results):
        if number % 2 == 0 and isinstance(result, asyncio.CancelledError):
            continue
        assert ids(result) == ids(expected[number])
    assert any(isinstance(result, asyncio.CancelledError) for result in results)
    assert_nothing_is_left(engine)


async def test_a_deadline_of_the_caller_frees_its_slots(model):
    engine = build_engine(model)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(engine.generate(request([5], params)), timeout=1e-4)
    assert_nothing_is_left(engine)


async def test_an_aborted_request_returns_what_it_has(model):
    engine = build_engine(model)
    params = SamplingParams(max_tokens=16, ignore_eos=True, seed=1)
    task = asyncio.create_task(engine.generate(request([5], params, "a", num_samples=2)))
    while not engine.scheduler.rows:
        await asyncio.sleep(0)
    engine.abort("a")
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
