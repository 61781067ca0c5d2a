"""The engine itself, in this process: memory, seeds, connections, and what the server was told."""

import itertools
import socket
import time
from collections.abc import Iterator

import pytest

from tests.workers.rollout.helpers import training_log_probs
from tests.workers.rollout.sglang.engines import (
    PROMPT,
    ask,
    changed,
    engine_options,
    named_weights,
    rollout_config,
    save_model,
    trained_model,
)
from verl.config.serving import ServerConfig
from verl.workers.rollout.base import GenerationRequest, TokenDelta
from verl.workers.rollout.sglang_rollout import server as server_module
from verl.workers.rollout.sglang_rollout.hosted import SGLangEngine, build
from verl.workers.rollout.sglang_rollout.server import ServerRefusedError

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """Two connections at a time, weights from disk, and memory that can be given back."""
    server = ServerConfig(timeout=20.0, retry_delay=0.1, max_connections=2)
    options = engine_options(
        save_model(tmp_path_factory.mktemp("model")),
        rollout=rollout_config(multi_stage_wake_up=True, server=server),
        has_weights=True,
        own={"enable_memory_saver": True, "enable_deterministic_inference": True},
    )
    engine = build({**options, "environment": {}})
    yield engine
    engine.close()


def test_a_server_whose_port_was_taken_starts_on_another(tmp_path, monkeypatch, caplog):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        ports = iter([other.getsockname()[1], server_module.free_port()])
        monkeypatch.setattr(server_module, "free_port", lambda: next(ports))
        build({**engine_options(save_model(tmp_path)), "environment": {}}).close()
    assert "ddress already in use; starting it on another port" in caplog.text


def submit(engine: SGLangEngine, *requests: GenerationRequest) -> list[int]:
    """The numbers under which they run."""
    numbers = [next(NUMBERS) for _ in requests]
    for number, request in zip(numbers, requests, strict=True):
        engine.submit(number, request)
    return numbers


def finish(engine: SGLangEngine, numbers: list[int]) -> list[list[TokenDelta]]:
    deltas: dict[int, list[TokenDelta]] = {number: [] for number in numbers}
    deadline = time.monotonic() + 60
    while engine.has_work():
        assert time.monotonic() < deadline
        for number, delta in engine.step():
            deltas[number].append(delta)
    return list(deltas.values())


def run(engine: SGLangEngine, *requests: GenerationRequest) -> list[list[TokenDelta]]:
    return finish(engine, submit(engine, *requests))


def tokens(deltas: list[TokenDelta], sample: int = 0) -> list[int]:
    return [token for delta in deltas if delta.sample == sample for token in delta.token_ids]


def state(engine: SGLangEngine) -> dict:
    return engine._server.client.call("/server_info")["internal_states"][0]


def test_equal_seeds_give_equal_tokens_whatever_runs_beside(engine):
    alone = tokens(run(engine, ask(seed=11))[0])
    among = run(engine, ask(seed=5), ask(seed=11), ask([8, 9], seed=11))
    assert tokens(among[1]) == alone
    assert tokens(among[0]) != alone


def test_seeds_of_samples_are_worth_as_much_as_those_of_requests(engine):
    together = run(engine, ask(num_samples=2, seeds=(3, 4)))[0]
    assert tokens(together, 0) == tokens(run(engine, ask(seed=3))[0])
    assert tokens(together, 1) == tokens(run(engine, ask(seed=4))[0])


def test_requests_without_a_seed_are_not_all_alike(engine):
    drawn = run(engine, ask(num_samples=4), ask())
    assert (
        len({tuple(tokens(drawn[0], sample)) for sample in range(4)} | {tuple(tokens(drawn[1]))})
        == 5
    )


def test_requests_beyond_the_connections_wait_and_can_be_aborted_unseen(engine):
    before = state(engine)["num_served"]
    numbers = submit(engine, *[ask(max_tokens=40, ignore_eos=True) for _ in range(4)])
    engine.abort(numbers[3])
    engine.abort(numbers[3])  # by its caller, and once more when that stops waiting
    deltas = finish(engine, numbers)
    assert [delta.stop_reason for delta in deltas[3]] == ["abort"]
    assert [len(tokens(own)) for own in deltas] == [40, 40, 40, 0]
    assert state(engine)["num_served"] == before + 3


def test_the_server_is_closed_to_whoever_has_no_key(engine):
    client = engine._server.client
    stranger = type(client)(**{**vars(client), "api_key": "guess"})
    with pytest.raises(ServerRefusedError, match="status 401"):
        stranger.call("/server_info")


def test_memory_of_generation_is_given_back_and_taken_again(engine):
    whole = tokens(run(engine, ask(temperature=0.0))[0])
    engine.sleep(1)
    assert state(engine)["released"] == ["kv_cache"]
    engine.sleep(1)  # it sleeps already
    engine.wake_up()
    assert state(engine)["released"] == []
    assert tokens(run(engine, ask(temperature=0.0))[0]) == whole


def test_a_wake_up_in_two_stages_takes_the_cache_only_after_the_weights_came(engine):
    model = changed(trained_model(), seed=3)
    engine.sleep(2)
    assert state(engine)["released"] == ["kv_cache", "weights"]
    engine.wake_up()
    assert state(engine)["released"] == ["kv_cache"]
    engine.load_weights(iter(named_weights(model)))
    assert state(engine)["released"] == []
    (delta, *more) = run(engine, ask(temperature=0.0))[0]
    drawn = [*delta.log_probs, *(value for d in more for value in d.log_probs)]
    expected = training_log_probs(model, PROMPT, tokens([delta, *more]))
    assert drawn == pytest.approx(expected.tolist(), abs=1e-4)


def test_an_update_clears_the_cache_of_the_server(engine):
    before = state(engine)["num_flushes"]
    engine.load_weights(iter(named_weights(trained_model())))
    assert state(engine)["num_flushes"] > before


def test_weights_of_an_adapter_are_refused_without_one_and_nothing_changes(engine):
    engine.load_weights(iter(named_weights(trained_model())))
    whole = tokens(run(engine, ask(temperature=0.0))[0])
    weight = named_weights(trained_model())[0][1]
    with pytest.raises(ValueError, match="started without one"):
        engine.load_weights([("model.layers.0.self_attn.q_proj.lora_A.weight", weight)])
    engine.load_weights(iter(named_weights(trained_model())))
    assert tokens(run(engine, ask(temperature=0.0))[0]) == whole
