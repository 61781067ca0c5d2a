"""Engines that are lost: everybody gets one answer, and nobody a wrong one."""

import asyncio
import time
from contextlib import suppress

import pytest

from tests.agent_loop.fakes import FakeRollout, loop_config
from tests.agent_loop.test_server_manager import ask
from verl.agent_loop.fleet import Fleet
from verl.agent_loop.server_manager import AsyncLLMServerManager
from verl.config.serving import ServerConfig
from verl.workers.rollout.base import EngineLostError, GenerationRequest, SamplingParams

REQUESTS = [(f"r{i}", [i, 7], 10 + i) for i in range(6)]
EXPECTED = [[7, 10 + i, 2] for i in range(6)]


class LosableRollout(FakeRollout):
    """Lost with all it works on after `num_answers` answers, as often as `num_losses` says."""

    def __init__(self, *, num_losses: int, num_answers: int = 0) -> None:
        super().__init__()
        self.num_losses, self.num_answers = num_losses, num_answers
        self.is_lost = False

    def is_alive(self) -> bool:
        return not self.is_lost

    async def generate(self, request):
        if self.is_lost:
            raise EngineLostError("it is gone")
        outputs = await super().generate(request)
        await asyncio.sleep(0)
        if self.num_answers:
            self.num_answers -= 1
        elif self.num_losses:
            self.num_losses -= 1
            self.is_lost = True
        if self.is_lost:
            raise EngineLostError("it was killed")
        return outputs

    def recover(self) -> None:
        assert self.is_lost, "there was nothing to recover"
        self.is_lost = False


def manager(*engines, attempts=3, recover=LosableRollout.recover):
    config = loop_config(server=ServerConfig(max_attempts=attempts))
    return AsyncLLMServerManager(config, engines, recover=recover)


def test_requests_of_a_lost_engine_are_asked_again_after_its_recovery():
    engine, recovered = LosableRollout(num_losses=1, num_answers=2), []

    def recover(lost):
        recovered.append(lost)
        engine.recover()

    made = manager(engine, recover=recover)
    assert [output.token_ids for output in ask(made, *REQUESTS)] == EXPECTED
    assert recovered == [engine], "one loss, though several requests have noticed it"
    assert made.num_redispatched == 4
    assert made._fleet.load == [0]


def test_another_engine_takes_over_while_the_lost_one_recovers():
    lost, well = LosableRollout(num_losses=1), FakeRollout(delay_of={7: 4})
    made = manager(lost, well, recover=None)
    assert [output.token_ids for output in ask(made, *REQUESTS)] == EXPECTED
    assert len(lost.requests) == 3
    assert len(well.requests) == 6
    assert made.num_redispatched == 3


def test_an_engine_that_is_lost_again_and_again_is_given_up_after_so_many_attempts():
    engine = LosableRollout(num_losses=9)
    with pytest.raises(EngineLostError, match="it was killed"):
        ask(manager(engine, attempts=3), ("a", [1], 1))
    assert len(engine.requests) == 3


def test_without_recovery_the_loss_of_all_engines_is_told_with_its_reason():
    engines = [LosableRollout(num_losses=1) for _ in range(2)]
    with pytest.raises(EngineLostError, match=r"all 2 rollout engines are lost.*it was killed"):
        ask(manager(*engines, recover=None), *REQUESTS)


def test_a_recovery_that_fails_is_told_to_those_who_wait_for_the_engine():
    def fail(engine):
        raise OSError("no room on the device")

    with pytest.raises(EngineLostError, match="none could be started again: no room on the device"):
        ask(manager(LosableRollout(num_losses=1), recover=fail), *REQUESTS)


def test_engines_are_recovered_one_at_a_time():
    under_way, most = [], []

    def recover(engine):
        under_way.append(engine)
        most.append(len(under_way))
        time.sleep(0.01)
        under_way.remove(engine)

    async def lose_all():
        fleet = Fleet([FakeRollout() for _ in range(3)], recover)
        for place in range(3):
            with suppress(EngineLostError), fleet.asking(place, request):
                raise EngineLostError("gone")
        await asyncio.wait(set(fleet._out.values()), timeout=10)
        return await fleet.choose(preferred=2)

    request = GenerationRequest(request_id="a", prompt_ids=[1], params=SamplingParams())
    assert asyncio.run(lose_all()) == 2, "it is back in service"
    assert most == [1, 1, 1]


def test_a_conversation_moves_to_another_engine_when_its_own_is_lost():
    lost, well = LosableRollout(num_losses=1, num_answers=1), FakeRollout()
    made = manager(lost, well, recover=None)

    async def talk():
        params = {"temperature": 1.0}
        for turn in range(3):
            await made.generate("x", prompt_ids=[1, turn], sampling_params=params)

    asyncio.run(talk())
    assert [request.prompt_ids for request in well.requests] == [(1, 1), (1, 2)]
