"""The options of a role about memory: what they do to its engine, and what is refused."""

import pytest
import torch

from tests.tiny_tokenizer import save_tiny_model
from tests.workers.engine.test_one_device import batch, weighted_sum
from tests.workers.reward_model.models import reward_model, save
from tests.workers.roles.test_reward_model import batch as reward_batch
from tests.workers.roles.test_roles import PROMPT, RESPONSE, annotated, group
from verl.config.actor import FSDPActorConfig
from verl.config.critic import FSDPCriticModelCfg
from verl.config.engine import FSDPEngineConfig
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.config.ppo import ActorRolloutRefConfig
from verl.config.ref import FSDPRefConfig
from verl.config.reward import FSDPRewardModelConfig, FSDPRewardModelModelConfig
from verl.config.rollout import RolloutConfig
from verl.utils.metric import reduce_metrics
from verl.workers.engine import EngineRegistry, EngineSpec, OneDeviceEngine
from verl.workers.engine.memory import MemoryOptions
from verl.workers.roles import ActorRolloutRefWorker
from verl.workers.roles.reward_model import RewardModelWorker

OPTIM = FSDPOptimizerConfig(lr=0.01)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def built(model_path, config, **options):
    model = HFModelConfig(path=model_path)
    return EngineRegistry.new(
        EngineSpec(model=model, engine=config, optimizer=OPTIM, device="cpu", **options)
    )


def test_an_actor_whose_weights_the_rollout_shares_keeps_them_on_the_device(model_path):
    config = FSDPEngineConfig(param_offload=True, optimizer_offload=True)
    memory = built(model_path, config, is_shared=True).memory
    assert (memory.param_offload, memory.optimizer_offload) == (False, True)


def test_an_actor_beside_an_engine_with_weights_of_its_own_may_be_offloaded(model_path):
    def trained(**options):
        config = FSDPEngineConfig(**options)
        engine = built(model_path, config)
        for _ in range(2):
            engine.train_batch(batch(4), weighted_sum, micro_batching=[[0, 1], [2, 3]])
        return dict(engine.get_per_tensor_param())

    plain, offloaded = trained(), trained(param_offload=True)
    assert all(torch.equal(plain[name], offloaded[name]) for name in plain)


def test_options_reach_the_engine(model_path):
    engine = EngineRegistry.new(
        EngineSpec(
            model=FSDPCriticModelCfg(path=model_path),
            engine=FSDPEngineConfig(
                param_offload=True, optimizer_offload=True, use_torch_compile=True
            ),
            optimizer=OPTIM,
            device="cpu",
            model_type="value_model",
            activation_offload=True,
            probe_micro_batch=True,
        )
    )
    assert isinstance(engine, OneDeviceEngine)
    assert engine.memory == MemoryOptions(
        optimizer_offload=True,
        param_offload=True,
        activation_offload=True,
        use_torch_compile=True,
        probe_micro_batch=True,
    )
    assert engine.residency.compiled is None, "on a CPU nothing is compiled"


def test_bit_for_bit_agreement_with_the_rollout_excludes_compiling(model_path):
    spec = EngineSpec(
        model=HFModelConfig(path=model_path),
        engine=FSDPEngineConfig(use_torch_compile=True),
        optimizer=OPTIM,
        device="cpu",
        is_exact=True,
    )
    assert not spec.memory(whole_weights=True).use_torch_compile


def policy(model_path, **options):
    config = ActorRolloutRefConfig(
        model=HFModelConfig(path=model_path, enable_activation_offload=bool(options)),
        actor=FSDPActorConfig(
            ppo_mini_batch_size=2,
            optim=FSDPOptimizerConfig(lr=0.01),
            use_kl_loss=True,
            fsdp_config=FSDPEngineConfig(optimizer_offload=bool(options)),
        ),
        ref=FSDPRefConfig(fsdp_config=FSDPEngineConfig(forward_only=True, **options)),
        rollout=RolloutConfig(n=2, prompt_length=PROMPT, response_length=RESPONSE, max_num_seqs=16),
    )
    return group(ActorRolloutRefWorker, config, "actor_rollout_ref")


def test_a_policy_with_everything_offloaded_learns_bit_for_bit_the_same(model_path):
    weights = []
    for options in ({}, {"param_offload": True}):
        workers = policy(model_path, **options)
        batch = annotated(workers)
        batch = batch.union(workers.compute_ref_log_prob(batch))
        for _ in range(2):
            metrics = reduce_metrics(workers.update_actor(batch).meta_info["metrics"])
        assert metrics["actor/num_oom_splits"] == 0
        assert "actor/loss_scale" not in metrics
        weights.append([p.detach().clone() for p in workers.workers[0].engine.module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_an_offloaded_reward_model_gives_the_same_scores(tmp_path):
    path = save(reward_model("llama"), tmp_path)
    scores = []
    for offload in (False, True):
        engine = FSDPEngineConfig(forward_only=True, param_offload=offload)
        model = FSDPRewardModelModelConfig(path=path, input_tokenizer=None, fsdp_config=engine)
        workers = group(RewardModelWorker, FSDPRewardModelConfig(enable=True, model=model))
        assert (workers.workers[0].engine.residency.weights is not None) == offload
        scores.append(workers.compute_rm_score(reward_batch()).batch["rm_scores"])
    assert torch.equal(*scores)


def test_a_policy_in_fp16_reports_its_loss_scale(model_path):
    engine = built(model_path, FSDPEngineConfig(dtype="float16"))
    assert next(engine.module.parameters()).dtype == torch.float16
    assert engine.optimizer is not None
    assert engine.optimizer.loss_scale is not None
