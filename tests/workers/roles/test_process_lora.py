"""A policy that trains adapters, beside an engine in a process of its own."""

import pytest

from tests.tiny_tokenizer import save_tiny_model
from tests.workers.roles import adapter_engine
from tests.workers.roles.test_process_rollout import answer, published
from tests.workers.roles.test_roles import PROMPT, RESPONSE, annotated, group
from verl.config.actor import FSDPActorConfig
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.config.ppo import ActorRolloutRefConfig
from verl.config.rollout import RolloutConfig
from verl.workers.roles import ActorRolloutRefWorker
from verl.workers.rollout.factory import register_engine

NAME = "takes_adapters_for_tests"
register_engine(NAME, takes_adapters=True)(adapter_engine.spec)


def policy(model_path, *, name):
    config = ActorRolloutRefConfig(
        model=HFModelConfig(path=model_path, lora_rank=4, lora_alpha=8),
        actor=FSDPActorConfig(ppo_mini_batch_size=2, optim=FSDPOptimizerConfig(lr=0.01)),
        rollout=RolloutConfig(
            n=2, prompt_length=PROMPT, response_length=RESPONSE, max_num_seqs=16, name=name
        ),
    )
    return group(ActorRolloutRefWorker, config, "actor_rollout")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["native_process", NAME])
def test_it_generates_with_the_adapter_as_it_is_after_every_update(name, tmp_path):
    path = str(save_tiny_model(tmp_path))
    beside, apart = policy(path, name="native"), policy(path, name=name)
    worker = apart.workers[0]
    first = answer(beside)
    try:
        for version in (0, 1, 2):
            assert apart.rollout_version() == [version]
            for found, expected in zip(answer(apart), answer(beside), strict=True):
                assert found.token_ids == expected.token_ids
                assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-4)
            batch = annotated(beside)
            for workers in (apart, beside):
                workers.update_actor(batch)
                metrics = published(workers)
            assert metrics == {}, "it shares the storage"
        assert answer(apart)[0].log_probs != pytest.approx(first[0].log_probs, abs=1e-3)
    finally:
        worker.stop_rollout()
