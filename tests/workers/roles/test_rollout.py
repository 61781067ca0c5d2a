"""A rollout with ranks of its own generates with the actor's weights, or not at all."""

import pytest
import torch

from tests.tiny_tokenizer import save_tiny_model
from tests.workers.roles.test_roles import PROMPT, RESPONSE, annotated, policy
from verl.config.actor import FSDPActorConfig
from verl.config.model import HFModelConfig
from verl.config.ppo import ActorRolloutRefConfig
from verl.config.rollout import RolloutConfig
from verl.config.serving import CheckpointEngineConfig
from verl.single_controller import ClassWithInitArgs, ResourcePool, WorkerError
from verl.single_controller.local import LocalWorkerGroup
from verl.workers.roles import RolloutWorker
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.publish import SentWeights
from verl.workers.rollout.remote import remote_rollouts
from verl.workers.weight_sync import Bucket, WeightSender, WeightsNotReadyError
from verl.workers.weight_sync.tcp import TcpSender


def request(seed=3):
    params = SamplingParams(max_tokens=RESPONSE, seed=seed)
    return GenerationRequest(request_id="a", prompt_ids=[5, 6, 7], params=params, num_samples=2)


def section(model_path, **options):
    return ActorRolloutRefConfig(
        hybrid_engine=False,
        nccl_timeout=options.pop("nccl_timeout", 60),
        model=HFModelConfig(path=model_path),
        actor=FSDPActorConfig(ppo_mini_batch_size=2),
        rollout=RolloutConfig(
            n=2,
            prompt_length=PROMPT,
            response_length=RESPONSE,
            max_num_seqs=16,
            checkpoint_engine=CheckpointEngineConfig(update_weights_bucket_megabytes=1),
            **options,
        ),
    )


def rollout_group(config, *, num_ranks=1):
    group = LocalWorkerGroup(
        ResourcePool([num_ranks]),
        ClassWithInitArgs(RolloutWorker, config),
        in_process=False,
        worker_env={"OMP_NUM_THREADS": "1", "VERL_FORCE_DEVICE": "cpu"},
    )
    group.init_model()
    return group


def send(actor, apart):
    return SentWeights(actor.workers[0].config, actor, apart).send()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def apart(model_path):
    group = rollout_group(section(model_path))
    yield group
    group.shutdown()


@pytest.fixture
def actor(model_path):
    return policy(model_path)


def test_nothing_is_generated_before_the_actors_weights_have_come(model_path):
    worker = RolloutWorker(section(model_path), device="cpu")
    worker.init_model()
    with pytest.raises(WeightsNotReadyError, match="holds no complete version"):
        worker.rollout.generate_batch([request()])


def test_a_rollout_elsewhere_follows_every_update_and_answers_as_the_actor_would(actor, apart):
    here, (there,) = actor.workers[0].rollout, remote_rollouts(apart, 1)
    before = None
    for version in (0, 1):
        assert send(actor, apart) == version
        found, expected = there.generate_batch([request()]), here.generate_batch([request()])
        assert [o.token_ids for o in found[0]] == [o.token_ids for o in expected[0]]
        assert found[0][0].log_probs == pytest.approx(expected[0][0].log_probs, abs=1e-5)
        assert set(found[0][0].policy_versions) == {version}
        assert found[0][0].log_probs != before, "the weights did not change"
        before = found[0][0].log_probs
        actor.update_actor(annotated(actor))


def test_an_actor_that_goes_back_to_an_earlier_version_is_followed(actor, apart):
    actor.workers[0].engine.policy_version = 7
    assert send(actor, apart) == 7
    actor.workers[0].engine.policy_version = 2
    assert send(actor, apart) == 2
    assert apart.rollout_version() == [2]


class FlipsAByte(TcpSender):
    """Something on the way damages the first bucket."""

    def send(self, bucket: Bucket) -> None:
        damaged = bucket.payload.clone()
        if bucket.index == 0:
            damaged[0] ^= 1
        bucket.payload.copy_(damaged)
        super().send(bucket)


def test_a_damaged_update_is_refused_and_nothing_served_until_a_right_one_comes(actor, apart):
    send(actor, apart)
    (address,) = apart.accept_weights("token")
    receiving = apart.execute_all_async("receive_weights")
    channel = FlipsAByte([address], "token", timeout_seconds=30)
    weights = actor.workers[0].engine.get_per_tensor_param()
    for bucket in WeightSender(1 << 20).buckets(weights, version=1):
        channel.send(bucket)
    assert channel.confirmations() == [None]
    channel.close()
    with pytest.raises(WorkerError, match="DamagedBucketError"):
        apart.resolve(receiving)
    with pytest.raises(WorkerError, match="WeightsNotReadyError"):
        apart.rollout_version()
    with pytest.raises(WorkerError, match="holds no complete version"):
        remote_rollouts(apart, 1)[0].generate_batch([request()])
    send(actor, apart)
    assert remote_rollouts(apart, 1)[0].generate_batch([request()])[0]


def test_an_update_that_is_announced_and_withheld_leaves_nothing_to_serve(model_path):
    worker = RolloutWorker(section(model_path, nccl_timeout=1), device="cpu")
    worker.init_model()
    worker.generator.weights._version = 4  # as after an update
    worker.accept_weights("token")
    with pytest.raises(RuntimeError, match="no sender with the right token came"):
        worker.receive_weights()
    with pytest.raises(WeightsNotReadyError):
        worker.rollout.generate_batch([request()])


def test_the_receivers_reason_is_told_when_the_sender_fails(actor, apart, tmp_path):
    other = policy(str(save_tiny_model(tmp_path / "other", "qwen2")))
    with pytest.raises(WorkerError, match="WrongWeightsError"):
        send(other, apart)
    send(actor, apart)


@pytest.mark.slow
def test_ranks_that_divide_the_rollouts_model_answer_as_one_does(actor, model_path):
    pair = rollout_group(section(model_path, tensor_model_parallel_size=2), num_ranks=2)
    actor.update_actor(annotated(actor))
    try:
        assert send(actor, pair) == 1
        (engine,) = remote_rollouts(pair, 2)
        found = engine.generate_batch([request()])[0]
    finally:
        pair.shutdown()
    expected = actor.workers[0].rollout.generate_batch([request()])[0]
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    torch.testing.assert_close(
        torch.tensor(found[0].log_probs),
        torch.tensor(expected[0].log_probs),
        atol=1e-5,
        rtol=0,
    )
