"""What a model does not have is refused by the plan, before a worker starts."""

import re

import pytest

from tests.tiny_models import tiny_config
from verl.config.faults import ConfigError
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.config.schema import nested
from verl.config.sft import SFTEngineConfig
from verl.config.validate import validate
from verl.models.loading import load_causal_lm
from verl.trainer.main_ppo import run
from verl.trainer.plan.model import model_faults

MODEL, CRITIC = "actor_rollout_ref.model", "critic.model"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FSDP = f"{ACTOR}.fsdp_config"
MEGATRON = {f"{ACTOR}.strategy": "megatron"}


def loaded(folder, family="qwen2", **values):
    """Four ranks and a model of 2 layers and 4 heads; experts of a sparse one are 4."""
    tiny_config(family).save_pretrained(folder)
    options = {
        "algorithm.adv_estimator": "grpo",
        "trainer.n_gpus_per_node": 4,
        "trainer.device": "cpu",
        f"{MODEL}.path": str(folder),
        f"{CRITIC}.path": str(folder),
        **values,
    }
    by_path = {tuple(key.split(".")): value for key, value in options.items()}
    return load_config(nested(by_path), PPOConfig, overrides=[f"{key}=" for key in options])


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {f"{MODEL}.override_config.router_aux_loss_coef": 0.1},
            f"{MODEL}.override_config.router_aux_loss_coef: Qwen2Config has no such value",
        ),
        (
            {f"{CRITIC}.override_config.zzz": 1, "algorithm.adv_estimator": "gae"},
            f"{CRITIC}.override_config.zzz: Qwen2Config has no such value",
        ),
        (
            {**MEGATRON, f"{MODEL}.override_config.moe_config.freeze_moe_router": True},
            f"{MODEL}.override_config.moe_config.freeze_moe_router is True, but qwen2 has no "
            "experts: leave it out",
        ),
        ({f"{ACTOR}.router_replay.mode": "R2"}, "is R2, but qwen2 has no experts whose routes"),
        ({f"{ROLLOUT}.enable_rollout_routing_replay": True}, "no experts whose routes could be re"),
        ({f"{ACTOR}.freeze_vision_tower": True}, "but qwen2 has no vision tower"),
        ({f"{FSDP}.ulysses_sequence_parallel_size": 8}, "(8) must divide the 4 attention heads"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 8}, "(8) must divide the 4 attention heads"),
        ({f"{FSDP}.expert_parallel_size": 4}, "is 4, but qwen2 has no experts"),
        ({f"{ROLLOUT}.expert_parallel_size": 4}, "is 4, but qwen2 has no experts"),
        (
            {f"{MODEL}.lora_rank": 4, f"{MODEL}.target_modules": ["all-linear", "experts"]},
            "target_modules names 'experts', but qwen2 has no experts",
        ),
    ],
)
def test_what_a_dense_model_lacks_is_refused(tmp_path, values, text):
    (fault,) = model_faults(loaded(tmp_path, **values).config)
    assert text in fault.text
    assert not fault.is_about_machine, "a plan refuses it too"


@pytest.mark.parametrize("is_plan", [True, False])
def test_plan_and_run_refuse_an_override_with_one_message_and_exit_code_2(tmp_path, is_plan):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    values = {
        f"{MODEL}.override_config.router_aux_loss_coef": 0.1,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1,
        "trainer.dry_run": is_plan,
        "trainer.n_gpus_per_node": 1,
        "data.train_files": str(tmp_path / "rows.jsonl"),
        "data.val_files": str(tmp_path / "rows.jsonl"),
        "trainer.logger": ["console"],
    }
    text = f"{MODEL}.override_config.router_aux_loss_coef: Qwen2Config has no such value"
    with pytest.raises(ConfigError, match=re.escape(text)) as refusal:
        run(loaded(tmp_path, **values))
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_position_embedings", "max_position_embeddings"),
        ("atn_implementation", "attn_implementation"),
    ],
)
def test_a_misspelt_value_is_named_with_what_was_meant(tmp_path, name, meant):
    (fault,) = model_faults(loaded(tmp_path, **{f"{MODEL}.override_config.{name}": 64}).config)
    assert fault.text.endswith(f"did you mean {meant!r}?")
    right = loaded(tmp_path, **{f"{MODEL}.override_config.{meant}": 64}).config
    assert list(model_faults(right)) == []


@pytest.mark.parametrize(
    "values",
    [
        {f"{MODEL}.override_config.router_aux_loss_coef": 0.1},
        {**MEGATRON, f"{MODEL}.override_config.moe_config.freeze_moe_router": True},
        {f"{ACTOR}.router_replay.mode": "R2"},
        {f"{FSDP}.expert_parallel_size": 4},
        {f"{MODEL}.lora_rank": 4, f"{MODEL}.target_modules": "experts"},
    ],
)
def test_a_sparse_model_has_all_that(tmp_path, values):
    assert list(model_faults(loaded(tmp_path, "qwen3_moe", **values).config)) == []


def test_ranks_that_divide_no_experts_are_refused(tmp_path):
    values = {f"{FSDP}.expert_parallel_size": 3}
    (fault,) = model_faults(loaded(tmp_path, "qwen3_moe", **values).config)
    assert "(3) must divide the 4 experts of qwen3_moe" in fault.text


def test_rotary_embeddings_that_depend_on_the_longest_sequence_cannot_be_shared(tmp_path):
    rope = {f"{MODEL}.override_config.rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    values = {**rope, f"{FSDP}.ulysses_sequence_parallel_size": 2}
    (fault,) = model_faults(loaded(tmp_path, **values).config)
    assert "'dynamic' rotary embeddings" in fault.text


def test_a_model_of_ones_own_class_is_left_to_its_library(tmp_path):
    values = {f"{MODEL}.override_config.zzz": 1}
    config = loaded(tmp_path, **values).config
    of_library = loaded(tmp_path, **values, **{f"{MODEL}.external_lib": "mine"}).config
    (tmp_path / "config.json").write_text('{"model_type": "of_my_own"}')
    assert list(model_faults(of_library)) == []
    (fault,) = model_faults(config)
    assert f"the model at {tmp_path} cannot be loaded" in fault.text


def test_fine_tuning_refuses_an_override_too(tmp_path):
    tiny_config("qwen2").save_pretrained(tmp_path)
    model = {"path": str(tmp_path), "override_config": {"router_aux_loss_coef": 0.1}}
    config = load_config({"model": model}, SFTEngineConfig).config
    (fault,) = model_faults(config)
    assert fault.text.startswith("model.override_config.router_aux_loss_coef: Qwen2Config has no")
    with pytest.raises(ConfigError, match="router_aux_loss_coef: Qwen2Config has no such value"):
        load_causal_lm(str(tmp_path), override_config=config.model.hf_overrides())


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({f"{ACTOR}.optim.optimizer": "Muon"}, "optim.optimizer is Muon, which looks at whole mat"),
        (
            {f"{FSDP}.fsdp_size": 3, f"{FSDP}.sharding": "full"},
            "fsdp_config.fsdp_size is 3, but 4 ranks cannot hold whole copies",
        ),
        (
            {f"{MODEL}.enable_activation_offload": True, f"{FSDP}.sharding": "full"},
            "enable_activation_offload is True, but where weights are gathered",
        ),
        (
            {**MEGATRON, f"{ACTOR}.router_replay.mode": "R2"},
            "router_replay.mode is R2, but routers of strategy=megatron choose by themselves",
        ),
        (
            {f"{ROLLOUT}.exact": True, f"{ROLLOUT}.tensor_model_parallel_size": 2},
            "tensor_model_parallel_size is 2; then the rollout engine has other weights",
        ),
        (
            {f"{ROLLOUT}.exact": True, f"{FSDP}.sharding": "full"},
            "sharding is full; then the rollout engine has other weights",
        ),
        ({**MEGATRON, f"{ROLLOUT}.exact": True}, "strategy is megatron; then the rollout engine"),
        (
            {f"{ROLLOUT}.exact": True, f"{FSDP}.ulysses_sequence_parallel_size": 2},
            "an exact model computes every product in one shape",
        ),
    ],
)
def test_what_several_ranks_cannot_do_is_refused_before_they_start(tmp_path, values, text):
    sizes = {"data.train_batch_size": 64, f"{ACTOR}.ppo_mini_batch_size": 64}
    one = {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1}
    made = loaded(tmp_path, **sizes, **one, **values)
    faults = validate(made.config, made.user_set, known_faults=made.faults)
    assert [fault.text for fault in faults if text in fault.text]
    plain = loaded(tmp_path, **sizes, **one)
    others = validate(plain.config, plain.user_set, known_faults=plain.faults)
    assert not [fault.text for fault in others if text in fault.text]
