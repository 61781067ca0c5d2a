"""The workers of a run, called through a worker group in this process."""

import traceback
from pathlib import Path

import pytest
import torch

import verl
from tests.tiny_tokenizer import save_tiny_model, tiny_tokenizer
from verl.algos.aggregate import agg_loss
from verl.algos.policy_losses.ppo import compute_policy_loss_vanilla
from verl.algos.registry import register_policy_loss
from verl.config.actor import FSDPActorConfig, PolicyLossConfig
from verl.config.critic import FSDPCriticConfig, FSDPCriticModelCfg
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.config.ppo import ActorRolloutRefConfig
from verl.config.rollout import RolloutConfig
from verl.protocol import DataProto
from verl.single_controller import ClassWithInitArgs, ResourcePool
from verl.single_controller.local import LocalWorkerGroup
from verl.workers.roles import ActorRolloutRefWorker, CriticWorker
from verl.workers.rollout.base import GenerationRequest, SamplingParams

PROMPT, RESPONSE = 6, 8


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def policy(model_path, role="actor_rollout_ref", actor=None, **rollout):
    optimizer = FSDPOptimizerConfig(lr=0.01)
    config = ActorRolloutRefConfig(
        model=HFModelConfig(path=model_path),
        actor=actor or FSDPActorConfig(ppo_mini_batch_size=2, optim=optimizer),
        rollout=RolloutConfig(
            n=2, prompt_length=PROMPT, response_length=RESPONSE, max_num_seqs=16, **rollout
        ),
    )
    return group(ActorRolloutRefWorker, config, role)


def group(cls, *arguments):
    built = LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(cls, *arguments))
    built.init_model()
    return built


def rollout_batch(worker):
    prompts = [[5, 6, 7], [9, 10]]
    requests = [
        GenerationRequest(
            request_id=str(i),
            prompt_ids=ids,
            params=SamplingParams(max_tokens=RESPONSE, seed=i),
            num_samples=2,
        )
        for i, ids in enumerate(prompts)
    ]
    outputs = worker.rollout.generate_batch(requests)
    rows = [(ids, o) for ids, samples in zip(prompts, outputs, strict=True) for o in samples]
    ids = torch.zeros(4, PROMPT + RESPONSE, dtype=torch.long)
    mask, log_probs = torch.zeros_like(ids), torch.zeros(4, RESPONSE)
    for row, (prompt, output) in enumerate(rows):
        span = slice(PROMPT - len(prompt), PROMPT + len(output.token_ids))
        ids[row, span] = torch.tensor(prompt + output.token_ids)
        mask[row, span] = 1
        log_probs[row, : len(output.log_probs)] = torch.tensor(output.log_probs)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
            "responses": ids[:, PROMPT:],
            "response_mask": mask[:, PROMPT:],
            "rollout_log_probs": log_probs,
            "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None] * mask[:, PROMPT:],
        }
    )


def annotated(workers):
    batch = rollout_batch(workers.workers[0])
    scored = workers.compute_log_prob(batch)
    return batch.union(scored)


def test_old_log_probs_are_those_the_responses_were_sampled_with(model_path):
    batch = annotated(policy(model_path))
    torch.testing.assert_close(
        batch.batch["old_log_probs"], batch.batch["rollout_log_probs"], rtol=0, atol=5e-6
    )


def test_the_reference_is_the_starting_policy_and_stays_it(model_path):
    workers = policy(model_path)
    batch = annotated(workers)
    before = workers.compute_ref_log_prob(batch).batch["ref_log_prob"]
    torch.testing.assert_close(before, batch.batch["old_log_probs"], rtol=0, atol=1e-6)
    workers.update_actor(batch)
    assert torch.equal(workers.compute_ref_log_prob(batch).batch["ref_log_prob"], before)
    moved = workers.compute_log_prob(batch).batch["old_log_probs"]
    assert not torch.equal(moved, batch.batch["old_log_probs"])


FRAMES: list[list[str]] = []


@register_policy_loss("notes_its_frames_for_tests")
def notes_its_frames(**arguments):
    package = str(Path(verl.__file__).parent)
    frames = traceback.extract_stack()
    FRAMES.append([f.name for f in frames if f.filename.startswith(package)])
    return compute_policy_loss_vanilla(**arguments)


def test_few_functions_lie_between_the_worker_and_the_policy_loss(model_path):
    loss = PolicyLossConfig(loss_mode="notes_its_frames_for_tests")
    actor = FSDPActorConfig(ppo_mini_batch_size=2, policy_loss=loss)
    workers = policy(model_path, actor=actor)
    workers.update_actor(annotated(workers))
    inside = FRAMES[0][FRAMES[0].index("update_actor") :]
    assert inside == [
        "update_actor",
        "update_policy",
        "train_batch",
        "train_passes",
        "run",
        "_train_pass",
        "loss",
    ], "a reader follows each of them; the policy loss is the eighth"


@register_policy_loss("of_the_older_signature_for_tests")
def older_signature(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
    ratio = (log_prob - old_log_prob).exp()
    zero = torch.tensor(0.0)
    return agg_loss(-ratio * advantages, response_mask, loss_agg_mode), zero, zero, zero


def test_a_policy_loss_of_the_older_signature_trains(model_path):
    loss = PolicyLossConfig(loss_mode="of_the_older_signature_for_tests")
    workers = policy(model_path, actor=FSDPActorConfig(ppo_mini_batch_size=2, policy_loss=loss))
    metrics = workers.update_actor(annotated(workers)).meta_info["metrics"]
    assert metrics["actor/grad_norm"] != 0


def test_the_rollout_engine_sees_an_update_at_once_without_a_copy(model_path):
    workers = policy(model_path)
    worker = workers.workers[0]
    assert worker.rollout.policy_version == 0
    before = rollout_batch(worker)
    workers.update_actor(annotated(workers))
    assert worker.rollout.policy_version == 1
    after = rollout_batch(worker)
    same = torch.equal(before.batch["rollout_log_probs"], after.batch["rollout_log_probs"])
    assert not same, "the weights moved, so must the log-probs"
    shared = {p.data_ptr() for p in worker.engine.module.parameters()}
    assert {p.data_ptr() for p in worker.rollout.core.runner.module.parameters()} == shared


def test_a_restored_policy_continues_bit_for_bit(model_path, tmp_path):
    straight = policy(model_path)
    batch = annotated(straight)
    straight.update_actor(batch)
    straight.save_checkpoint(str(tmp_path / "actor"))
    restored = policy(model_path)
    restored.load_checkpoint(str(tmp_path / "actor"))
    for workers in (straight, restored):
        workers.update_actor(batch)
    pairs = zip(
        *(w.workers[0].engine.module.parameters() for w in (straight, restored)), strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs)
    assert restored.workers[0].rollout.policy_version == 2


def test_a_critic_gives_values_and_learns(model_path, tmp_path):
    config = FSDPCriticConfig(
        model=FSDPCriticModelCfg(path=model_path), optim=FSDPOptimizerConfig(lr=0.01), rollout_n=2
    )
    critic = group(CriticWorker, config)
    batch = rollout_batch(policy(model_path, role="actor_rollout").workers[0])
    batch = batch.union(critic.compute_values(batch))
    batch.batch["returns"] = torch.ones(4, RESPONSE)
    metrics = critic.update_critic(batch).meta_info["metrics"]
    assert metrics["critic/vf_loss"] == [pytest.approx(0.5)], "one entry per rank"
    assert (critic.compute_values(batch).batch["values"] > 0).any()
    critic.save_checkpoint(str(tmp_path / "critic"))
    other = group(CriticWorker, config)
    other.load_checkpoint(str(tmp_path / "critic"))
    assert torch.equal(
        other.compute_values(batch).batch["values"], critic.compute_values(batch).batch["values"]
    )


def test_an_engine_that_nobody_has_registered_is_refused_with_the_known_ones(model_path):
    with pytest.raises(RuntimeError, match=r"rollout.name is 'vlm'; known: .*\bhf, native, .*vllm"):
        policy(model_path, name="vlm")


def test_the_tiny_tokenizer_spells():
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer("3+4=7").input_ids) == "3 + 4 = 7"
