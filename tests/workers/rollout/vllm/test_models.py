"""Updates reach every layer of other models: untied, with experts, with an adapter, on two workers.

vLLM keeps weights in another form than the checkpoint (fused, cut, packed for its kernels), and
what is not packed again after an update would go on with the old weights.
"""

from pathlib import Path

import pytest
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict

from tests.workers.rollout.vllm.helpers import (
    assert_greedy_as,
    needs_vllm,
    rollout_config,
    saved_model,
    train_a_little,
    vllm_process,
    weights_of,
)
from verl.utils.environment import vllm_python
from verl.workers.rollout.engine_options import vllm_environment, vllm_options
from verl.workers.rollout.process.client import EngineProcess, EngineSpec

pytestmark = needs_vllm
EXPERTS = {"head_dim": 32, "moe_intermediate_size": 64}


def assert_updates_arrive(engine: EngineProcess, model, first_version: int) -> None:
    for version in (first_version, first_version + 1):
        train_a_little(model)
        engine.update_weights(weights_of(model), version)
        assert_greedy_as(model, engine)


def test_a_model_with_an_output_layer_of_its_own_is_served_from_disk_and_updated(tmp_path):
    model = saved_model(tmp_path, "llama", tie_word_embeddings=False)
    engine = vllm_process(tmp_path, has_weights=True)
    engine.start()
    assert engine.policy_version == 0
    assert_greedy_as(model, engine)
    assert_updates_arrive(engine, model, first_version=1)
    engine.close()


def test_experts_that_are_one_tensor_in_the_module_arrive_in_each_expert(tmp_path):
    model = saved_model(tmp_path, "qwen3_moe", **EXPERTS)
    engine = vllm_process(tmp_path)
    engine.start()
    assert_updates_arrive(engine, model, first_version=1)
    without = [named for named in weights_of(model) if "layers.1.mlp.experts.down" not in named[0]]
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts"):
        engine.update_weights(without, version=3)
    engine.close()


@pytest.mark.slow
def test_two_workers_that_divide_the_model_take_the_same_updates(tmp_path):
    model = saved_model(tmp_path, "qwen2", tie_word_embeddings=True)
    engine = vllm_process(tmp_path, tensor_model_parallel_size=2)
    engine.start()
    assert_updates_arrive(engine, model, first_version=1)
    engine.close()


def test_an_update_replaces_the_adapter_and_leaves_the_base_alone(tmp_path):
    base = saved_model(tmp_path, "llama", tie_word_embeddings=False)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    policy = get_peft_model(base, lora)
    engine = EngineProcess(adapter_spec(tmp_path, policy))
    engine.start()
    for version in (1, 2):
        for name, weight in policy.named_parameters():
            if "lora_" in name:
                weight.data.normal_(0.0, 0.1)
        engine.update_weights(get_peft_model_state_dict(policy).items(), version)
        assert_greedy_as(policy, engine)
    with pytest.raises(ValueError, match=r"model\.norm\.weight, but .* LoRA adapter"):
        engine.update_weights([("model.norm.weight", base.model.norm.weight.data)], version=3)
    engine.close()


def adapter_spec(folder: Path, policy: PeftModel) -> EngineSpec:
    config = policy.peft_config["default"].to_dict()
    adapter = {
        **{name: config[name] for name in ("r", "lora_alpha", "bias", "use_rslora")},
        "peft_type": "LORA",
        "target_modules": sorted(config["target_modules"]),
    }
    return EngineSpec(
        build="verl.workers.rollout.vllm_rollout.hosted:build",
        options=vllm_options(rollout_config(), str(folder), device="cpu", adapter=adapter),
        environment=vllm_environment("cpu"),
        python=vllm_python(),
    )


def test_an_argument_that_vllm_does_not_know_is_refused_by_name(tmp_path):
    saved_model(tmp_path, "llama")
    engine = vllm_process(tmp_path, engine_kwargs={"vllm": {"block_sise": 32}})
    with pytest.raises(
        ValueError, match=r"engine_kwargs\.vllm\.block_sise .*did you mean 'block_size'"
    ):
        engine.start()
