"""Engines that work by themselves, and engines without steps, as another process uses them."""

import asyncio
import time
from concurrent.futures import wait

import pytest

from tests.agent_loop.fakes import FakeRollout
from verl.workers.rollout import visits
from verl.workers.rollout.base import (
    EngineLostError,
    GenerationRequest,
    SamplingParams,
    StreamingRollout,
)
from verl.workers.rollout.visits import PolledVisits, Visit, VisitReport, WholeVisits, visits_of


def request(number):
    params = SamplingParams(max_tokens=4)
    return GenerationRequest(
        request_id=f"r{number}", prompt_ids=[number], params=params, seeds=(number,)
    )


class WorksByItself(FakeRollout, StreamingRollout):
    """Answers a request when it is told to, by setting the future of its first token."""

    def __init__(self):
        super().__init__()
        self.answers = {}
        self.aborted = []

    async def generate(self, request):
        number = request.prompt_ids[0]
        if number < 0:
            raise ValueError("token ids are not negative")
        answer = self.answers[number] = asyncio.get_running_loop().create_future()
        await answer
        return await super().generate(request)

    def stream(self, request):
        raise NotImplementedError

    def abort(self, request_id):
        self.aborted.append(request_id)

    def finish(self, number, error=None):
        deadline = time.monotonic() + 5
        while number not in self.answers and time.monotonic() < deadline:
            time.sleep(0.001)
        answer = self.answers[number]
        if error is None:
            answer.get_loop().call_soon_threadsafe(answer.set_result, None)
        else:
            answer.get_loop().call_soon_threadsafe(answer.set_exception, error)


@pytest.fixture
def engine():
    return WorksByItself()


@pytest.fixture
def polled(engine, monkeypatch):
    monkeypatch.setattr(visits, "POLL_SECONDS", 2.0)  # longer than a visit with news ever takes
    return PolledVisits(engine)


def tokens(report):
    return {number: samples[0].token_ids for number, samples in report.finished.items()}


def test_the_kind_of_engine_decides_how_it_is_visited(engine):
    assert isinstance(visits_of(engine), PolledVisits)
    assert isinstance(visits_of(FakeRollout()), WholeVisits)


def test_a_visit_ends_when_something_has_ended_and_reports_it_once(engine, polled):
    started = time.monotonic()
    asyncio.run_coroutine_threadsafe(finish_soon(engine, 1), polled._loop)
    report = polled.visit(Visit(new={10: request(1), 20: request(2)}))
    assert time.monotonic() - started < 2.0
    assert tokens(report) == {10: [1, 1, 2]}
    engine.finish(2)
    assert tokens(polled.visit(Visit())) == {20: [2, 2, 2]}
    assert polled.visit(Visit()) == VisitReport()


async def finish_soon(engine, number):
    while number not in engine.answers:
        await asyncio.sleep(0.001)
    engine.answers[number].set_result(None)


def test_a_visit_without_news_is_short(engine, polled, monkeypatch):
    monkeypatch.setattr(visits, "POLL_SECONDS", 0.01)
    assert polled.visit(Visit(new={1: request(1)})) == VisitReport()


def test_what_cannot_run_is_refused_and_the_others_go_on(engine, polled):
    report = polled.visit(Visit(new={1: request(-1), 2: request(2)}))
    assert report == VisitReport(refused={1: "token ids are not negative"})
    engine.finish(2)
    assert tokens(polled.visit(Visit())) == {2: [2, 2, 2]}


def test_what_is_given_up_is_aborted_by_its_name(engine, polled, monkeypatch):
    monkeypatch.setattr(visits, "POLL_SECONDS", 0.01)
    polled.visit(Visit(new={1: request(1)}))
    polled.visit(Visit(given_up=(1, 99)))
    assert engine.aborted == ["r1"]


def test_answers_that_came_before_a_loss_are_delivered_and_then_the_loss(engine, polled):
    polled.visit(Visit(new={1: request(-1), 2: request(2), 3: request(3)}))
    engine.finish(2)
    engine.finish(3, EngineLostError("killed"))
    wait([answer for _, answer in polled._under_way.values()], timeout=5)
    assert tokens(polled.visit(Visit())) == {2: [2, 2, 2]}
    with pytest.raises(EngineLostError, match="killed"):
        polled.visit(Visit())
    assert polled.visit(Visit()) == VisitReport(), "nobody waits for what was lost"


def test_an_engine_without_steps_answers_all_requests_of_a_visit_in_it():
    engine = FakeRollout()
    report = WholeVisits(engine).visit(Visit(new={1: request(1), 2: request(2)}))
    assert tokens(report) == {1: [1, 1, 2], 2: [2, 2, 2]}
    assert WholeVisits(engine).visit(Visit(given_up=(1,))) == VisitReport()


def test_an_engine_without_steps_that_fails_says_so():
    with pytest.raises(OSError, match="no memory"):
        WholeVisits(FakeRollout(error=OSError("no memory"))).visit(Visit(new={1: request(1)}))
    refusing = WholeVisits(FakeRollout(error=ValueError("too long")))
    assert refusing.visit(Visit(new={1: request(1)})) == VisitReport(refused={1: "too long"})
