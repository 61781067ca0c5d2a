"""The names under which recipes know an engine."""

import asyncio

import pytest
import torch

from tests.tiny_tokenizer import save_tiny_model
from tests.workers.roles.test_roles import PROMPT, RESPONSE, policy
from verl.config.model import HFModelConfig
from verl.config.rollout import RolloutConfig
from verl.workers.rollout.base import GenerationRequest, SamplingParams, get_rollout_class
from verl.workers.rollout.replica import (
    RolloutMode,
    RolloutReplica,
    RolloutReplicaRegistry,
    get_rollout_replica_class,
)

SAMPLING = {"temperature": 1.0, "seed": 3, "logprobs": True}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def workers(model_path):
    return policy(model_path)


def replica(model_path, rank=0, **options):
    config = RolloutConfig(prompt_length=PROMPT, response_length=RESPONSE, **options)
    return get_rollout_replica_class(config.name)(rank, config, HFModelConfig(path=model_path))


def expected(workers, max_tokens):
    request = GenerationRequest(
        request_id="x", prompt_ids=[5, 6], params=SamplingParams(max_tokens=max_tokens, seed=3)
    )
    return workers.workers[0].rollout.generate_batch([request])[0][0]


async def ask(made, **limits):
    return await made.server_handle.generate([5, 6], {**SAMPLING, **limits}, request_id="a")


def test_a_hybrid_replica_answers_with_the_weights_that_are_trained(model_path, workers):
    made = replica(model_path)

    async def run():
        await made.init_hybrid(workers)
        return [await ask(made), await ask(made, max_new_tokens=3)]

    assert asyncio.run(run()) == [expected(workers, PROMPT + RESPONSE - 2), expected(workers, 3)]
    assert made.mode is RolloutMode.HYBRID


def test_a_replica_without_an_engine_says_what_to_do(model_path, workers):
    with pytest.raises(RuntimeError, match="init_hybrid"):
        _ = replica(model_path).server_handle
    with pytest.raises(ValueError, match="replica_rank is 1, and the group has 1 engines"):
        asyncio.run(replica(model_path, rank=1).init_hybrid(workers))
    with pytest.raises(ValueError, match="RewardModelWorker"):
        RolloutReplica(0, RolloutConfig(), HFModelConfig(path=model_path), is_reward_model=True)


def test_a_class_of_ones_own_is_registered_by_name():
    class Mine(RolloutReplica):
        pass

    RolloutReplicaRegistry.register("replica_of_this_test", lambda: Mine)
    assert get_rollout_replica_class("replica_of_this_test") is Mine
    with pytest.raises(ValueError, match="unknown rollout replica"):
        get_rollout_replica_class("no_such_engine")
    with pytest.raises(ValueError, match="unknown rollout"):
        get_rollout_class("no_such_engine")


@pytest.mark.slow
def test_a_standalone_replica_serves_what_is_on_disk(model_path, workers):
    made = replica(model_path, name="native_process")

    async def run():
        await made.init_standalone()
        before = await ask(made)
        await made.clear_kv_cache()
        await made.abort_all_requests()
        return before, await ask(made)

    try:
        before, after = asyncio.run(run())
    finally:
        made.close()
    assert before == after == expected(workers, PROMPT + RESPONSE - 2)


@pytest.mark.slow
def test_a_rollout_of_a_recipe_takes_weights_and_gives_memory_back(model_path, workers):
    config = RolloutConfig(name="native_process", prompt_length=PROMPT, response_length=RESPONSE)
    made = get_rollout_class(config.name)(config, HFModelConfig(path=model_path), None)
    module = workers.workers[0].engine.module
    weights = [(name, torch.clone(weight.detach())) for name, weight in module.named_parameters()]

    async def run():
        first = await made.update_weights(iter(weights))
        await made.release()
        await made.resume(["weights", "kv_cache"])
        return first, await made.update_weights(iter(weights), version=7)

    try:
        first, second = asyncio.run(run())
    finally:
        made.process.close()
    assert (first.version, second.version) == (1, 7)
    assert first.fingerprint == second.fingerprint
