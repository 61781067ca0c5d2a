"""An engine that is called in polls gives what it gives when it is called directly."""

import asyncio
import threading

import pytest

from tests.tiny_models import tiny_model
from verl.single_controller import ClassWithInitArgs, ResourcePool, WorkerError
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker import Worker
from verl.single_controller.local import LocalWorkerGroup
from verl.workers.rollout import polling
from verl.workers.rollout.base import EngineLostError, GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine
from verl.workers.rollout.polling import SteppedPoller, WaitingPoller
from verl.workers.rollout.remote import RemoteRollout
from verl.workers.weight_sync.bucket import WeightsNotReadyError

LIMITS = EngineLimits(max_num_seqs=4, max_prompt_tokens=8, max_response_tokens=24)


def make_engine():
    return NativeEngine(tiny_model("llama"), LIMITS, eos_token_ids=[])


class Generates(Worker):
    def __init__(self):
        super().__init__()
        self.engine = make_engine()
        self.poller = SteppedPoller(self.engine.core)
        self.num_polls = 0
        self.held_poll, self.may_go_on = -1, threading.Event()
        self.is_broken = False
        self.lacks = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_poll(self, poll):
        self.num_polls += 1
        if self.num_polls == self.held_poll:
            assert self.may_go_on.wait(60)
        if self.is_broken:
            raise FloatingPointError("the weights have diverged")
        return self.poller.poll(poll)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_version(self):
        if self.lacks is not None:
            raise self.lacks
        return 7

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_sleep(self):
        self.engine.sleep()


@pytest.fixture
def remote():
    return RemoteRollout(LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Generates)), [0])


def worker_of(remote):
    return remote._group.workers[0]


def request(name, seed=0, tokens=24, num_samples=1, prompt=(5, 6, 7)):
    params = SamplingParams(max_tokens=tokens, seed=seed)
    return GenerationRequest(
        request_id=name, prompt_ids=prompt, params=params, num_samples=num_samples
    )


REQUESTS = [request(f"r{i}", seed=i, tokens=5 + 3 * i, num_samples=2) for i in range(4)]


def together(remote, requests):
    async def ask():
        return await asyncio.gather(*(remote.generate(one) for one in requests))

    return asyncio.run(ask())


def test_answers_are_those_of_the_engine_itself(remote):
    expected = make_engine().generate_batch(REQUESTS)
    assert together(remote, REQUESTS) == expected
    assert worker_of(remote).num_polls > 1
    assert remote.generate_batch(REQUESTS) == expected
    assert remote.policy_version == 7


def test_an_engine_that_steps_by_itself_gives_the_same(remote):
    worker = worker_of(remote)
    worker.poller = WaitingPoller(worker.engine)
    expected = make_engine().generate_batch(REQUESTS)
    assert together(remote, REQUESTS) == expected
    assert remote.generate_batch(REQUESTS) == expected


def test_samples_are_told_as_they_end(remote):
    ended = []
    future = remote.submit(REQUESTS[2], lambda sample, output: ended.append((sample, output)))
    assert dict(enumerate(future.result(timeout=30))) == dict(ended)


def test_a_request_that_comes_later_joins_those_that_run(remote, monkeypatch):
    monkeypatch.setattr(polling, "STEPS_PER_POLL", 1)

    async def ask():
        worker = worker_of(remote)
        worker.held_poll = 2
        first = asyncio.create_task(remote.generate(request("long", tokens=24)))
        while worker.num_polls < 2:
            await asyncio.sleep(0.001)
        late = asyncio.create_task(remote.generate(request("short", seed=3, tokens=4)))
        await asyncio.sleep(0)
        ended = []
        first.add_done_callback(lambda _: ended.append("first"))
        late.add_done_callback(lambda _: ended.append("late"))
        worker.may_go_on.set()
        outputs = await late, await first
        assert ended == ["late", "first"]
        return outputs

    late, first = asyncio.run(ask())
    assert late == make_engine().generate_batch([request("short", seed=3, tokens=4)])[0]
    assert first == make_engine().generate_batch([request("long", tokens=24)])[0]


def test_a_request_that_cannot_run_is_refused_and_the_others_go_on(remote):
    async def ask():
        asked = [remote.generate(request("bad", prompt=())), remote.generate(REQUESTS[0])]
        return await asyncio.gather(*asked, return_exceptions=True)

    refused, answered = asyncio.run(ask())
    assert isinstance(refused, ValueError)
    assert answered == make_engine().generate_batch(REQUESTS[:1])[0]
    with pytest.raises(ValueError, match="prompt"):
        remote.generate_batch([request("bad", prompt=())])


def test_what_nobody_waits_for_any_more_is_given_up(remote, monkeypatch):
    monkeypatch.setattr(polling, "STEPS_PER_POLL", 1)

    async def ask():
        task = asyncio.create_task(remote.generate(request("dropped", tokens=24)))
        while worker_of(remote).num_polls < 1:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(ask())
    together(remote, [request("next", tokens=2)])
    assert worker_of(remote).engine.core.scheduler.unfinished == []
    remote.sleep()


def test_an_aborted_request_ends_with_what_it_has(remote, monkeypatch):
    monkeypatch.setattr(polling, "STEPS_PER_POLL", 1)

    async def ask():
        worker = worker_of(remote)
        worker.held_poll = 2
        task = asyncio.create_task(remote.generate(request("stopped", tokens=24)))
        while worker.num_polls < 2:
            await asyncio.sleep(0.001)
        remote.abort("stopped")
        worker.may_go_on.set()
        return await task

    (output,) = asyncio.run(ask())
    assert output.stop_reason == "abort"
    assert 0 < len(output.token_ids) < 24
    whole = make_engine().generate_batch([request("stopped", tokens=24)])[0][0]
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]


def test_a_failing_engine_is_told_to_everybody_and_can_go_on(remote):
    worker_of(remote).is_broken = True

    async def ask():
        asked = [remote.generate(one) for one in REQUESTS[:2]]
        return await asyncio.gather(*asked, return_exceptions=True)

    for error in asyncio.run(ask()):
        assert isinstance(error, WorkerError)
        assert "the weights have diverged" in str(error)
    worker_of(remote).is_broken = False
    assert together(remote, REQUESTS) == make_engine().generate_batch(REQUESTS)


@pytest.mark.parametrize("kind", [EngineLostError, WeightsNotReadyError])
def test_what_an_engine_lacks_is_told_as_by_the_engine_itself(remote, kind):
    worker_of(remote).lacks = kind("it has just restarted")
    with pytest.raises(kind, match=r"^it has just restarted$"):
        _ = remote.policy_version
