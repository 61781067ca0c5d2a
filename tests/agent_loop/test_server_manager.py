import asyncio

import pytest

from tests.agent_loop.fakes import FakeRollout, held_engines, idle_load, loop_config
from verl.agent_loop.server_manager import AsyncLLMServerManager

PARAMS = {"temperature": 1.0, "top_p": 1.0, "logprobs": True}


def ask(manager, *requests):
    """Send (request id, prompt, seed) at the same time; the outputs."""

    async def run():
        return await asyncio.gather(
            *(
                manager.generate(name, prompt_ids=ids, sampling_params={**PARAMS, "seed": seed})
                for name, ids, seed in requests
            )
        )

    return asyncio.run(run())


def test_samples_of_one_prompt_travel_as_one_request_and_keep_their_seeds():
    engine = FakeRollout()
    manager = AsyncLLMServerManager(loop_config(), [engine])
    outputs = ask(manager, ("a", [5, 6], 11), ("b", [5, 6], 12), ("c", [7], 13))
    assert [(list(r.prompt_ids), r.num_samples, r.seeds) for r in engine.requests] == [
        ([5, 6], 2, (11, 12)),
        ([7], 1, (13,)),
    ]
    assert [output.token_ids for output in outputs] == [[6, 11, 2], [6, 12, 2], [7, 13, 2]]


def test_a_group_larger_than_the_engine_is_cut_up():
    engine = FakeRollout()
    manager = AsyncLLMServerManager(loop_config(max_num_seqs=2), [engine])
    outputs = ask(manager, *((str(i), [5], i) for i in range(5)))
    assert [request.num_samples for request in engine.requests] == [2, 2, 1]
    assert [output.token_ids[1] for output in outputs] == [0, 1, 2, 3, 4]


def test_prompts_go_to_the_engine_with_least_to_do():
    engines = held_engines(2, num_requests=3)
    manager = AsyncLLMServerManager(loop_config(), engines)
    ask(manager, ("a", [1], 1), ("b", [1], 2), ("c", [2], 3), ("d", [3], 4))
    loads = [[request.num_samples for request in engine.requests] for engine in engines]
    assert loads == [[2], [1, 1]], (
        "the second engine gets two prompts for the first one's two samples"
    )
    assert idle_load(manager.fleet) == [0, 0]


def test_what_an_engine_has_to_do_is_counted_in_tokens():
    engines = held_engines(2, num_requests=4)
    manager = AsyncLLMServerManager(loop_config(), engines)
    short = {**PARAMS, "max_tokens": 1}

    async def run():
        long = manager.generate("a", prompt_ids=[9] * 5 + [1], sampling_params=PARAMS)
        await asyncio.gather(
            long,
            *(manager.generate(str(i), prompt_ids=[i], sampling_params=short) for i in (2, 3, 4)),
        )

    asyncio.run(run())
    sent = [[request.prompt_ids[-1] for request in engine.requests] for engine in engines]
    assert sent == [[1], [2, 3, 4]], "ten tokens against two, four and six"


def test_a_later_turn_goes_to_the_engine_of_the_first():
    engines = held_engines(2, num_requests=2)
    manager = AsyncLLMServerManager(loop_config(), engines)

    async def talk():
        first = manager.generate("x", prompt_ids=[1], sampling_params=PARAMS)
        second = manager.generate("y", prompt_ids=[2], sampling_params=PARAMS)
        await asyncio.gather(first, second)
        for _ in range(3):
            await manager.generate("y", prompt_ids=[2, 3], sampling_params=PARAMS)

    asyncio.run(talk())
    assert len(engines[0].requests) == 1
    assert len(engines[1].requests) == 4


def test_only_the_newest_requests_are_remembered():
    manager = AsyncLLMServerManager(loop_config(), [FakeRollout()], max_cache_size=2)
    ask(manager, *((name, [ord(name)], 0) for name in "abcd"))
    assert [manager.fleet.engine_of(name) for name in "abcd"] == [None, None, 0, 0]


def test_responses_are_never_longer_than_the_configuration_allows():
    manager = AsyncLLMServerManager(loop_config(response_length=4), [FakeRollout()])
    assert manager.sampling_params({}).max_tokens == 4
    assert manager.sampling_params({"max_tokens": 3}).max_tokens == 3
    assert manager.sampling_params({"max_new_tokens": 99}).max_tokens == 4
    assert manager.sampling_params({"stop": "###"}).stop == ("###",)


def test_a_misspelt_sampling_parameter_is_refused():
    manager = AsyncLLMServerManager(loop_config(), [FakeRollout()])
    with pytest.raises(ValueError, match=r"unknown sampling parameters \['temprature'\].*top_p"):
        manager.sampling_params({"temprature": 1.0})


def test_an_engine_that_fails_fails_those_who_wait_for_it():
    manager = AsyncLLMServerManager(loop_config(), [FakeRollout(error=OSError("gone"))])
    with pytest.raises(RuntimeError, match=r"request a failed: OSError\('gone'\)"):
        ask(manager, ("a", [1], 1))
    assert idle_load(manager.fleet) == [0]


def test_a_request_that_is_refused_says_why_in_its_own_words():
    manager = AsyncLLMServerManager(loop_config(), [FakeRollout(error=ValueError("too long"))])
    with pytest.raises(ValueError, match=r"^too long$"):
        ask(manager, ("a", [1], 1))


@pytest.mark.parametrize("media", ["image_data", "video_data"])
def test_an_engine_never_gets_the_ids_of_a_prompt_without_its_images(media):
    manager = AsyncLLMServerManager(loop_config(), [FakeRollout(error=OSError("asked"))])
    generation = manager.generate("a", prompt_ids=[1], sampling_params={}, **{media: [b"png"]})
    refusal = "need a model that sees|videos are not given to engines"
    with pytest.raises(ValueError, match=refusal):
        asyncio.run(generation)


def test_there_must_be_an_engine():
    with pytest.raises(ValueError, match="at least one rollout engine"):
        AsyncLLMServerManager(loop_config(), [])


def test_the_request_id_reaches_the_engine_as_the_session_once_a_session_has_a_second_turn():
    engine = FakeRollout()
    manager = AsyncLLMServerManager(loop_config(), [engine])
    ask(manager, ("a", [5, 6], 11), ("b", [5, 6], 12))
    ask(manager, ("b", [5, 6, 9], 12))
    ask(manager, ("c", [5, 6], 11), ("d", [5, 6], 12))
    assert [request.session_ids for request in engine.requests] == [None, ("b",), ("c", "d")]
    manager.close_session("b")
    assert engine.closed_sessions == ["b"]


def test_a_request_is_aborted_when_nobody_waits_for_any_of_its_samples():
    engine = FakeRollout(hold=lambda: True)
    manager = AsyncLLMServerManager(loop_config(), [engine])

    async def run():
        tasks = [
            asyncio.create_task(
                manager.generate(name, prompt_ids=[5], sampling_params={**PARAMS, "seed": 1})
            )
            for name in "ab"
        ]
        while not engine.requests:
            await asyncio.sleep(0.001)
        tasks[0].cancel()
        await asyncio.sleep(0.01)
        assert manager.fleet.slots[0].num_running == 1
        tasks[1].cancel()
        await asyncio.wait(tasks, timeout=60)
        while manager.fleet.slots[0].num_running:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), timeout=100))
    assert idle_load(manager.fleet) == [0]


def test_one_callback_delivers_all_samples_that_have_come():
    engine = held_engines(1, num_requests=64)[0]
    manager = AsyncLLMServerManager(loop_config(max_num_seqs=8), [engine])
    delivered = []

    async def run():
        deliver = asyncio.get_running_loop().call_soon_threadsafe
        asyncio.get_running_loop().call_soon_threadsafe = lambda *call: (
            delivered.append(call),
            deliver(*call),
        )
        asked = [
            manager.generate(f"{i}", prompt_ids=[i // 8], sampling_params={**PARAMS, "seed": i})
            for i in range(512)
        ]
        return await asyncio.gather(*asked)

    outputs = asyncio.run(run())
    assert [output.token_ids[1] for output in outputs] == [i % 50 for i in range(512)]
    assert len(delivered) <= 64, "at most one for each request"
