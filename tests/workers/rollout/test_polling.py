"""Engines as another process uses them: in polls that wait for a moment."""

import time
from concurrent.futures import Future
from dataclasses import replace

import pytest

from tests.agent_loop.fakes import FakeRollout
from tests.workers.rollout.helpers import build_engine
from verl.workers.rollout import polling
from verl.workers.rollout.base import (
    EngineLostError,
    GenerationRequest,
    SamplingParams,
    TokenOutput,
)
from verl.workers.rollout.polling import Poll, PollReport, SteppedPoller, WaitingPoller, poller_of


def request(number, num_samples=1):
    params = SamplingParams(max_tokens=4)
    return GenerationRequest(
        request_id=f"r{number}", prompt_ids=[number], params=params, num_samples=num_samples
    )


class StepsByItself(FakeRollout):
    """Ends a sample when it is told to, by the first token of its prompt."""

    def __init__(self):
        super().__init__()
        self.futures = {}
        self.on_end = {}
        self.aborted = []

    def submit(self, request, on_end=None):
        number = request.prompt_ids[0]
        future = self.futures[number] = Future()
        self.on_end[number] = on_end
        if number < 0:
            future.set_exception(ValueError("token ids are not negative"))
        return future

    def abort(self, request_id):
        self.aborted.append(request_id)

    def end(self, number, sample=0, *, is_last=True):
        self.on_end[number](sample, output(number + sample))
        if is_last:
            self.futures[number].set_result([])

    def fail(self, number, error):
        self.futures[number].set_exception(error)


def output(token):
    return TokenOutput(token_ids=[token], stop_reason="stop")


@pytest.fixture
def engine():
    return StepsByItself()


@pytest.fixture
def poller(engine, monkeypatch):
    monkeypatch.setattr(polling, "POLL_SECONDS", 0.01)
    return WaitingPoller(engine)


def test_ranks_that_share_a_model_are_stepped_and_other_engines_are_waited_for(engine):
    native = build_engine()
    assert isinstance(poller_of(engine), WaitingPoller)
    assert isinstance(poller_of(native), WaitingPoller)
    native.core.runner.tp_group = object()
    assert isinstance(poller_of(native), SteppedPoller)
    with pytest.raises(RuntimeError, match="lockstep"):
        native.submit(request(1))


def test_each_sample_is_reported_once_as_it_ends(engine, poller):
    assert poller.poll(Poll(new={10: request(1, num_samples=2), 20: request(2)})) == PollReport()
    engine.end(1, sample=1, is_last=False)
    assert poller.poll(Poll()) == PollReport(ended={10: {1: output(2)}})
    engine.end(2)
    engine.end(1)
    assert poller.poll(Poll()) == PollReport(ended={10: {0: output(1)}, 20: {0: output(2)}})
    assert poller.poll(Poll()) == PollReport()


def test_a_poll_ends_when_something_has_ended(monkeypatch):
    monkeypatch.setattr(polling, "POLL_SECONDS", 60.0)
    started = time.monotonic()
    report = WaitingPoller(FakeRollout()).poll(Poll(new={1: request(1)}))
    assert time.monotonic() - started < 60.0
    assert report.ended[1][0].token_ids == [1, 0, 2]


def test_what_cannot_run_is_refused_and_the_others_go_on(engine, poller):
    report = poller.poll(Poll(new={1: request(-1), 2: request(2)}))
    assert report == PollReport(refused={1: "token ids are not negative"})
    engine.end(2)
    assert poller.poll(Poll()) == PollReport(ended={2: {0: output(2)}})


def test_what_is_aborted_is_aborted_by_name_and_what_is_cancelled_is_cancelled(engine, poller):
    poller.poll(Poll(new={1: request(1), 2: request(2)}))
    poller.poll(Poll(aborted=(1, 99), cancelled=(2, 99)))
    assert engine.aborted == ["r1"]
    assert engine.futures[2].cancelled()
    assert not engine.futures[1].cancelled()


def test_what_ended_before_a_loss_is_reported_and_then_the_loss(engine, poller):
    poller.poll(Poll(new={number: request(number) for number in (2, 3, 4)}))
    engine.end(2)
    engine.fail(3, EngineLostError("killed"))
    assert poller.poll(Poll()) == PollReport(ended={2: {0: output(2)}})
    with pytest.raises(EngineLostError, match="killed"):
        poller.poll(Poll())
    assert engine.futures[4].cancelled(), "nobody waits for it"
    assert poller.poll(Poll()) == PollReport()


def test_counted_steps_give_what_the_engine_gives_by_itself(monkeypatch):
    monkeypatch.setattr(polling, "STEPS_PER_POLL", 1)
    params = SamplingParams(max_tokens=12)  # more than the engine draws in one step
    requests = {
        n: replace(request(n + 3, num_samples=2), seeds=(n, n + 1), params=params) for n in range(5)
    }
    expected = build_engine().generate_batch(list(requests.values()))
    poller = SteppedPoller(build_engine().core)
    ended, usages, poll = {}, [], Poll(new=requests)
    for _ in range(20):
        report = poller.poll(poll)
        usages.append(report.cache_usage)
        for number, samples in report.ended.items():
            ended.setdefault(number, {}).update(samples)
        poll = Poll()
    found = [[ended[number][sample] for sample in (0, 1)] for number in range(5)]
    assert found == expected
    assert 0 < max(usages) <= 1
    assert usages[-1] == 0
    assert all(one.first_token_seconds > 0 for samples in found for one in samples)
