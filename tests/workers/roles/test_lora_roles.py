"""Workers whose policy or critic trains adapters."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.tiny_tokenizer import save_tiny_model
from tests.workers.roles.test_roles import PROMPT, RESPONSE, annotated, group, rollout_batch
from verl.config.actor import FSDPActorConfig
from verl.config.critic import FSDPCriticConfig, FSDPCriticModelCfg
from verl.config.engine import FSDPEngineConfig
from verl.config.model import HFModelConfig, LoraConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.config.ppo import ActorRolloutRefConfig
from verl.config.ref import FSDPRefConfig, RefModelConfig
from verl.config.rollout import RolloutConfig
from verl.config.trainer import CheckpointConfig
from verl.models.lora import adapter_weights, has_lora, is_adapter
from verl.single_controller.base.failures import WorkerError
from verl.workers.roles import ActorRolloutRefWorker, CriticWorker

EVERYTHING = ["model", "optimizer", "extra", "hf_model"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def policy(
    model_path, *, ref_path=None, dtype="auto", exact=False, contents=None, loads=None, **model
):
    actor = FSDPActorConfig(
        ppo_mini_batch_size=2,
        optim=FSDPOptimizerConfig(lr=0.01),
        fsdp_config=FSDPEngineConfig(dtype=dtype),
        checkpoint=CheckpointConfig(
            save_contents=contents or EVERYTHING[:3], load_contents=loads or EVERYTHING[:3]
        ),
    )
    config = ActorRolloutRefConfig(
        model=HFModelConfig(path=model_path, **{"lora_rank": 4, **model}),
        actor=actor,
        ref=FSDPRefConfig(model=RefModelConfig(path=ref_path)),
        rollout=RolloutConfig(
            n=2, prompt_length=PROMPT, response_length=RESPONSE, max_num_seqs=16, exact=exact
        ),
    )
    return group(ActorRolloutRefWorker, config, "actor_rollout_ref")


def module(workers):
    return workers.workers[0].engine.module


def weights(workers):
    return {name: p.detach().clone() for name, p in module(workers).named_parameters()}


def ref_log_probs(workers, batch):
    return workers.compute_ref_log_prob(batch).batch["ref_log_prob"]


def trained_adapter(model_path, folder):
    """A folder with an adapter that differs from nothing."""
    workers = policy(model_path)
    workers.update_actor(annotated(workers))
    workers.save_checkpoint(str(folder))
    return str(folder / "lora_adapter"), workers


def test_an_update_moves_every_adapter_and_no_bit_of_the_base(model_path):
    workers = policy(model_path)
    before, optimizer = weights(workers), workers.workers[0].engine.optimizer
    assert all(is_adapter(name) for name in optimizer.masters)
    for _ in range(2):  # in the first step only B has a gradient, because it is 0
        workers.update_actor(annotated(workers))
    after = weights(workers)
    for name, value in before.items():
        assert torch.equal(after[name], value) != is_adapter(name), name


@pytest.mark.parametrize("exact", [False, True])
def test_responses_are_sampled_with_the_adapters_that_training_sees(model_path, exact):
    workers = policy(model_path, exact=exact)
    workers.update_actor(annotated(workers))
    batch = annotated(workers)
    old, sampled = batch.batch["old_log_probs"], batch.batch["rollout_log_probs"]
    torch.testing.assert_close(old, sampled, rtol=0, atol=0 if exact else 5e-6)
    distance = (ref_log_probs(workers, batch) - old).abs().max()
    assert distance > 1e-3, "the adapters make a difference"


def test_the_reference_is_the_policy_without_its_adapters_and_no_second_model(model_path):
    workers = policy(model_path)
    assert workers.workers[0].reference.engine is workers.workers[0].engine
    batch = annotated(workers)
    before = ref_log_probs(workers, batch)
    assert torch.equal(before, batch.batch["old_log_probs"])
    workers.update_actor(batch)
    assert torch.equal(ref_log_probs(workers, batch), before)
    moved = workers.compute_log_prob(batch).batch["old_log_probs"]
    assert not torch.equal(moved, before), "the adapters are on again"
    trained = {name for name, p in module(workers).named_parameters() if p.requires_grad}
    assert trained == set(workers.workers[0].engine.optimizer.masters)


def test_a_run_that_starts_from_an_adapter_is_compared_with_that_adapter(model_path, tmp_path):
    path, first = trained_adapter(model_path, tmp_path)
    workers = policy(model_path, lora_adapter_path=path, lora_rank=0)
    engine = workers.workers[0].engine
    assert workers.workers[0].reference.engine is engine
    assert engine.optimizer.masters.keys() == first.workers[0].engine.optimizer.masters.keys()
    batch = annotated(workers)
    start = ref_log_probs(workers, batch)
    assert torch.equal(start, batch.batch["old_log_probs"])
    base = ref_log_probs(first, batch)
    assert (start - base).abs().max() > 1e-3, "the base is another policy"
    workers.update_actor(batch)
    assert torch.equal(ref_log_probs(workers, batch), start)
    moved = workers.compute_log_prob(batch).batch["old_log_probs"]
    assert not torch.equal(moved, start)
    with engine.disable_adapter():
        bare = workers.compute_log_prob(batch).batch["old_log_probs"]
    assert torch.equal(bare, base)


def test_a_reference_model_of_its_own_is_loaded_beside_the_adapters(model_path, tmp_path):
    other = str(save_tiny_model(tmp_path / "other", "qwen2"))
    workers = policy(model_path, ref_path=other)
    assert type(workers.workers[0].reference.engine.module).__name__ == "Qwen2ForCausalLM"
    batch = annotated(workers)
    assert (ref_log_probs(workers, batch) - batch.batch["old_log_probs"]).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_policy_continues_bit_for_bit(model_path, tmp_path, dtype):
    straight = policy(model_path, dtype=dtype)
    batch = annotated(straight)
    straight.update_actor(batch)
    straight.save_checkpoint(str(tmp_path))
    restored = policy(model_path, dtype=dtype)
    restored.load_checkpoint(str(tmp_path))
    for workers in (straight, restored):
        workers.update_actor(batch)
    found, masters = weights(restored), straight.workers[0].engine.optimizer.masters
    assert all(torch.equal(found[name], value) for name, value in weights(straight).items())
    for name, master in restored.workers[0].engine.optimizer.masters.items():
        assert torch.equal(master, masters[name]), name


@pytest.mark.parametrize("saves_all", [False, True])
def test_a_checkpoint_holds_the_adapter_and_on_demand_the_merged_model(
    model_path, tmp_path, saves_all
):
    from peft import PeftModel

    workers = policy(model_path, contents=EVERYTHING if saves_all else None)
    batch = annotated(workers)
    workers.update_actor(batch)
    workers.save_checkpoint(str(tmp_path))
    ids = batch.batch["input_ids"][:1, PROMPT - 3 :]
    base = AutoModelForCausalLM.from_pretrained(model_path)
    expected = PeftModel.from_pretrained(base, str(tmp_path / "lora_adapter"))(ids).logits
    stored = json.loads((tmp_path / "lora_adapter/adapter_config.json").read_text())
    assert (stored["r"], stored["lora_alpha"]) == (4, 16)
    assert (tmp_path / "huggingface/tokenizer.json").exists()
    assert (tmp_path / "huggingface/model.safetensors").exists() == saves_all
    if saves_all:
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
        torch.testing.assert_close(merged(ids).logits, expected)


def test_other_engines_get_merged_weights_under_the_names_of_the_base(model_path):
    workers = policy(model_path)
    workers.update_actor(annotated(workers))
    plain = AutoModelForCausalLM.from_pretrained(model_path)
    sent = dict(workers.workers[0].engine.get_per_tensor_param())
    assert {name: w.shape for name, w in sent.items()} == {
        name: p.shape for name, p in plain.named_parameters()
    }
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(sent[name], plain.get_parameter(name))


def critic(model_path, contents=None):
    config = FSDPCriticConfig(
        model=FSDPCriticModelCfg(path=model_path, lora_rank=4),
        optim=FSDPOptimizerConfig(lr=0.01),
        rollout_n=2,
        checkpoint=CheckpointConfig(save_contents=contents or EVERYTHING[:3]),
    )
    return group(CriticWorker, config)


def test_a_critic_trains_adapters_and_its_head(model_path, tmp_path):
    from peft import PeftModel

    workers = critic(model_path, EVERYTHING)
    batch = rollout_batch(policy(model_path).workers[0])
    batch.batch["returns"] = torch.ones(4, RESPONSE)
    before = weights(workers)
    for _ in range(3):
        batch.batch["values"] = workers.compute_values(batch).batch["values"]
        workers.update_critic(batch)
    for name, value in weights(workers).items():
        is_trained = is_adapter(name) or name.startswith("score.")
        assert torch.equal(before[name], value) != is_trained, name
    values = workers.compute_values(batch).batch["values"]
    workers.save_checkpoint(str(tmp_path))
    restored = critic(model_path)
    restored.load_checkpoint(str(tmp_path))
    assert torch.equal(restored.compute_values(batch).batch["values"], values)

    ids = batch.batch["input_ids"][:1, PROMPT - 3 :]
    base = AutoModelForTokenClassification.from_pretrained(model_path, num_labels=1)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "lora_adapter"))(ids).logits
    merged = AutoModelForTokenClassification.from_pretrained(tmp_path / "huggingface")
    torch.testing.assert_close(merged(ids).logits, adapted)
    assert adapted.abs().max() > 0


def test_two_workers_of_one_configuration_start_with_the_same_adapters(model_path):
    one, same = (adapter_weights(module(policy(model_path))) for _ in range(2))
    assert all(torch.equal(same[name], value) for name, value in one.items())


def test_a_resumed_run_keeps_the_reference_it_started_with(model_path, tmp_path):
    path, _ = trained_adapter(model_path, tmp_path / "first")
    started = policy(model_path, lora_adapter_path=path)
    batch = annotated(started)
    start = ref_log_probs(started, batch)
    started.update_actor(batch)
    started.save_checkpoint(str(tmp_path / "second"))
    resumed = policy(model_path, lora_adapter_path=path)
    resumed.load_checkpoint(str(tmp_path / "second"))
    assert torch.equal(ref_log_probs(resumed, batch), start)
    assert all(torch.equal(weights(resumed)[n], value) for n, value in weights(started).items())


def test_the_adapter_alone_can_be_taken_from_a_checkpoint(model_path, tmp_path):
    _, first = trained_adapter(model_path, tmp_path)
    second = policy(model_path, loads=["model"])
    second.load_checkpoint(str(tmp_path))
    found = weights(second)
    assert all(torch.equal(found[name], value) for name, value in weights(first).items())
    assert not second.workers[0].engine.optimizer.optimizer.state, "moments start afresh"


def test_a_checkpoint_without_an_adapter_is_refused(model_path, tmp_path):
    policy(model_path, lora_rank=0).save_checkpoint(str(tmp_path))
    with pytest.raises(WorkerError, match="load_contents also asks for model"):
        policy(model_path).load_checkpoint(str(tmp_path))


def test_generation_with_merged_weights_follows_every_update_and_leaves_the_base_alone(model_path):
    workers = policy(model_path, lora=LoraConfig(merge=True))
    worker, before = workers.workers[0], weights(workers)
    assert not has_lora(worker.rollout.core.runner.module)
    for version in (1, 2):
        workers.update_actor(annotated(workers))
        assert worker.rollout.policy_version == version
        batch = annotated(workers)
        old, sampled = batch.batch["old_log_probs"], batch.batch["rollout_log_probs"]
        torch.testing.assert_close(old, sampled, rtol=0, atol=2e-5)
        assert (ref_log_probs(workers, batch) - sampled).abs().max() > 1e-3
    for name, value in weights(workers).items():
        assert is_adapter(name) or torch.equal(before[name], value), name


def test_merged_weights_cannot_be_exact(model_path):
    with pytest.raises(WorkerError, match=r"model.lora.merge=False, or rollout.exact=False"):
        policy(model_path, lora=LoraConfig(merge=True), exact=True)
