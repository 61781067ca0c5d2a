"""A fleet shares work among engines, and an engine that is lost costs nobody an answer."""

import asyncio
import threading
import time

import pytest

from tests.agent_loop.fakes import FakeRollout, held_engines, idle_load, loop_config
from tests.agent_loop.test_server_manager import ask
from tests.server.engines import ScriptedRollout, saying
from verl.agent_loop.server_manager import AsyncLLMServerManager
from verl.config.serving import ServerConfig
from verl.workers.rollout.base import EngineLostError, GenerationRequest, SamplingParams
from verl.workers.rollout.fleet import Fleet
from verl.workers.weight_sync.bucket import WeightsNotReadyError

REQUESTS = [(f"r{i}", [i, 7], 10 + i) for i in range(6)]
EXPECTED = [[7, 10 + i, 2] for i in range(6)]


class LosableRollout(FakeRollout):
    """Lost with all it works on after `num_answers` answers, as often as `num_losses` says."""

    def __init__(self, *, num_losses: int, num_answers: int = 0, **options) -> None:
        super().__init__(**options)
        self.num_losses, self.num_answers = num_losses, num_answers
        self.is_lost = False
        self.life = 0

    def is_alive(self) -> bool:
        return not self.is_lost

    async def generate(self, request):
        if self.is_lost:
            raise EngineLostError("it is gone")
        life = self.life
        outputs = await super().generate(request)
        await asyncio.sleep(0)
        if self.num_answers:
            self.num_answers -= 1
        elif self.num_losses:
            self.num_losses -= 1
            self.is_lost, self.life = True, self.life + 1
        if self.life != life:  # also if it has recovered meanwhile
            raise EngineLostError("it was killed")
        return outputs

    def recover(self) -> None:
        assert self.is_lost, "there was nothing to recover"
        self.is_lost = False


def a_request(
    name: str = "r", prompt: int = 80, max_tokens: int = 5, length: int = 3, **options
) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return GenerationRequest(
        request_id=name, prompt_ids=(prompt,) * length, params=params, **options
    )


def results(futures):
    return [future.result(timeout=60) for future in list(futures)]


def manager(*engines, attempts=3, recover=LosableRollout.recover):
    config = loop_config(server=ServerConfig(max_attempts=attempts))
    return AsyncLLMServerManager(config, engines, recover=recover)


# ---- load and sessions ---------------------------------------------------------------------------


def test_the_engine_with_the_fewest_outstanding_tokens_is_chosen():
    engines = held_engines(3, num_requests=9)
    fleet = Fleet(engines)
    long = a_request("long", 81, max_tokens=500)
    results(map(fleet.submit, [long, *(a_request(f"{n}", 90 + n) for n in range(8))]))
    assert [len(engine.requests) for engine in engines] == [1, 4, 4]
    assert idle_load(fleet) == [0, 0, 0]


def test_equal_beginnings_stay_together_while_their_engine_is_about_as_free():
    engines = held_engines(2, num_requests=0)
    fleet = Fleet(engines)
    for _ in range(4):
        results([fleet.submit(a_request(prompt=85))])
    assert sorted(len(engine.requests) for engine in engines) == [0, 4]
    for engine in engines:
        engine.hold = lambda: sum(len(one.requests) for one in engines) < 14
    results([fleet.submit(a_request(prompt=85, max_tokens=50)) for _ in range(10)])
    assert min(len(engine.requests) for engine in engines) == 5


def test_the_turns_of_a_session_stay_together():
    engines = [FakeRollout() for _ in range(4)]
    fleet = Fleet(engines)
    for prompt in range(80, 90):
        results([fleet.submit(a_request(prompt=prompt, session_ids=("talk",)))])
    assert sorted(len(engine.requests) for engine in engines) == [0, 0, 0, 10]
    (index,) = [n for n, engine in enumerate(engines) if engine.requests]
    assert fleet.engine_of("talk") == index
    fleet.close_session("talk")
    assert engines[index].closed_sessions == ["talk"]
    assert fleet.engine_of("talk") is None


def test_a_fleet_needs_an_engine():
    with pytest.raises(ValueError, match="at least one"):
        Fleet([])


def test_requests_from_threads_and_from_event_loops_share_the_engines():
    engines = [FakeRollout() for _ in range(2)]
    fleet = Fleet(engines)
    outputs: dict[int, list[int]] = {}

    def ask_in_a_loop(number: int) -> None:
        async def ask():
            asked = [fleet.generate(a_request(f"{number}-{n}", number)) for n in range(20)]
            return await asyncio.gather(*asked)

        outputs[number] = [output.token_ids[0] for (output,) in asyncio.run(ask())]

    threads = [threading.Thread(target=ask_in_a_loop, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    here = results(fleet.submit(a_request(f"here-{n}", 50)) for n in range(20))
    for thread in threads:
        thread.join(timeout=60)
    assert outputs == {n: [n] * 20 for n in range(4)}
    assert [output.token_ids[0] for (output,) in here] == [50] * 20
    assert idle_load(fleet) == [0, 0]


def test_a_request_whose_future_is_cancelled_ends_on_its_engine():
    engine = FakeRollout(hold=lambda: True)
    fleet = Fleet([engine])
    future = fleet.submit(a_request())
    assert future.cancel()
    deadline = time.monotonic() + 60
    while fleet.slots[0].num_running and time.monotonic() < deadline:
        time.sleep(0.001)
    assert idle_load(fleet) == [0]


# ---- joining and leaving -------------------------------------------------------------------------


def test_an_engine_that_joins_gets_requests_and_one_that_leaves_finishes_those_it_has():
    is_open = threading.Event()
    first, second = (FakeRollout(hold=lambda: not is_open.is_set()) for _ in range(2))
    fleet = Fleet([first])
    futures = [fleet.submit(a_request("a", 1))]
    fleet.add(second)
    futures.append(fleet.submit(a_request("b", 2)))
    assert [slot.num_requests for slot in fleet.slots] == [1, 1]
    assert not fleet.retire(second)
    futures.append(fleet.submit(a_request("c", 2)))  # the second has the beginning of its prompt
    assert [slot.num_requests for slot in fleet.slots] == [2, 1]
    assert fleet.engines == [first, second]
    is_open.set()
    results(futures)
    assert idle_load(fleet) == [0, 0]
    assert fleet.retire(second)
    assert fleet.engines == [first]
    assert [request.request_id for request in second.requests] == ["b"]
    fleet.add(FakeRollout())
    assert [slot.index for slot in fleet.slots] == [0, 1]


def test_requests_that_wait_for_an_engine_are_given_to_one_that_joins():
    wait = threading.Event()
    fleet = Fleet([LosableRollout(num_losses=1)], recover=lambda engine: wait.wait(60) and None)
    held = fleet.submit(a_request("a"))
    assert idle_load(fleet) == [0]
    assert not held.done()
    joined = FakeRollout()
    fleet.add(joined)
    results([held])
    assert [request.request_id for request in joined.requests] == ["a"]
    wait.set()


# ---- loss ----------------------------------------------------------------------------------------


def test_requests_of_a_lost_engine_are_retried_after_its_recovery():
    engine, recovered = LosableRollout(num_losses=1, num_answers=2), []
    engine.hold = lambda: len(engine.requests) < 6

    def recover(lost):
        recovered.append(lost)
        engine.recover()

    made = manager(engine, recover=recover)
    assert [output.token_ids for output in ask(made, *REQUESTS)] == EXPECTED
    assert recovered == [engine], "one loss, though several requests have noticed it"
    assert made.num_redispatched == 4
    assert made.fleet.num_restarts == 1
    assert idle_load(made.fleet) == [0]


def test_another_engine_takes_over_while_the_lost_one_recovers():
    lost, well = LosableRollout(num_losses=1), FakeRollout()
    lost.hold = well.hold = lambda: len(lost.requests) + len(well.requests) < 6
    made = manager(lost, well, recover=None)
    assert [output.token_ids for output in ask(made, *REQUESTS)] == EXPECTED
    assert len(lost.requests) == 3
    assert len(well.requests) == 6
    assert made.num_redispatched == 3


def test_a_request_is_given_up_after_so_many_attempts():
    engine = LosableRollout(num_losses=9)
    with pytest.raises(EngineLostError, match="it was killed"):
        ask(manager(engine, attempts=3), ("a", [1], 1))
    assert len(engine.requests) == 3


def test_an_engine_that_finishes_nothing_between_restarts_is_given_up():
    engine = LosableRollout(num_losses=9)
    fleet = Fleet([engine], recover=LosableRollout.recover, max_attempts=9, max_restarts=2)
    with pytest.raises(EngineLostError, match=r"all 1 rollout engines are lost.*it was killed"):
        fleet.submit(a_request()).result(timeout=60)
    assert len(engine.requests) == 3
    assert fleet.num_restarts == 2


def test_without_recovery_the_loss_of_all_engines_is_told_with_its_reason():
    engines = [LosableRollout(num_losses=1) for _ in range(2)]
    with pytest.raises(EngineLostError, match=r"all 2 rollout engines are lost.*it was killed"):
        ask(manager(*engines, recover=None), *REQUESTS)


def test_a_recovery_that_fails_is_told_to_the_requests_that_wait_for_the_engine():
    def fail(engine):
        raise OSError("no room on the device")

    with pytest.raises(EngineLostError, match="none could be restarted: no room on the device"):
        ask(manager(LosableRollout(num_losses=1), recover=fail), *REQUESTS)


def test_engines_are_recovered_one_at_a_time():
    recovering, most = [], []

    def recover(engine):
        recovering.append(engine)
        most.append(len(recovering))
        time.sleep(0.01)
        recovering.remove(engine)
        engine.recover()

    engines = [LosableRollout(num_losses=1) for _ in range(3)]
    for engine in engines:
        engine.hold = lambda: sum(len(one.requests) for one in engines) < 3
    fleet = Fleet(engines, recover=recover, max_attempts=9)
    results([fleet.submit(a_request(f"{n}", 80 + n)) for n in range(3)])
    deadline = time.monotonic() + 60
    while fleet.num_in_service() < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert fleet.num_in_service() == 3
    assert most == [1, 1, 1]


def test_an_engine_found_dead_is_recovered():
    engine = LosableRollout(num_losses=0)
    fleet = Fleet([engine], recover=LosableRollout.recover)
    engine.is_lost = True
    assert fleet.num_in_service() == 0
    results([fleet.submit(a_request())])
    assert fleet.num_in_service() == 1
    assert fleet.num_redispatched == 0


def test_a_session_moves_to_another_engine_when_its_own_is_lost():
    lost, well = LosableRollout(num_losses=1, num_answers=1), FakeRollout()
    made = manager(lost, well, recover=None)

    async def talk():
        params = {"temperature": 1.0}
        for turn in range(3):
            await made.generate("x", prompt_ids=[1, turn], sampling_params=params)

    asyncio.run(talk())
    assert [request.prompt_ids for request in well.requests] == [(1, 1), (1, 2)]


def test_versions_are_unknown_while_an_engine_is_lost():
    class Gone(FakeRollout):
        @property
        def policy_version(self):
            raise EngineLostError("it is gone")

    assert Fleet([FakeRollout(), Gone()]).versions() == set()


def test_an_engine_that_waits_for_its_weights_has_no_version():
    class Restarted(FakeRollout):
        @property
        def policy_version(self):
            raise WeightsNotReadyError("no complete version")

    assert Fleet([FakeRollout(), Restarted()]).versions() == set()


# ---- streams -------------------------------------------------------------------------------------


async def texts(fleet: Fleet) -> list[int]:
    return [token async for delta in fleet.stream(a_request()) for token in delta.token_ids]


async def test_a_stream_that_has_not_begun_is_retried_and_one_that_has_begun_is_not():
    first, second = ScriptedRollout(saying("hello"), lose_after=0), ScriptedRollout(saying("hello"))
    fleet = Fleet([first, second])
    assert await texts(fleet) == list(saying("hello")(a_request()))
    assert [len(first.requests), len(second.requests)] == [1, 1]
    second.lose_after = 3
    with pytest.raises(EngineLostError, match="killed"):
        await texts(fleet)
    with pytest.raises(EngineLostError, match="all 2 rollout engines are lost"):
        await texts(fleet)
    assert idle_load(fleet) == [0, 0]


async def test_a_stream_does_not_wait_for_a_recovery():
    is_open = threading.Event()

    def wait_until_open(engine):
        assert is_open.wait(timeout=60)

    engine = ScriptedRollout(saying("hello"), lose_after=0)
    fleet = Fleet([engine], recover=wait_until_open)
    with pytest.raises(EngineLostError, match="no rollout engine is in service"):
        await texts(fleet)
    is_open.set()
