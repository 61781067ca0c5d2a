"""Megatron on one rank computes what the engine on one device does."""

import pytest

from tests.tiny_models import tiny_config
from tests.workers.engine.megatron.cases import (
    ADAM,
    PASSES,
    SGD,
    assert_same,
    close,
    engine_alone,
    megatron_engine,
    outcome,
    rows,
    value_loss,
    value_model,
)
from verl.config.model import HFModelConfig, McoreModelConfig
from verl.utils import environment
from verl.workers.engine.megatron import require_library
from verl.workers.engine.megatron.engine import refuse_layout, refuse_model_options
from verl.workers.engine.megatron.layout import Layout
from verl.workers.engine.memory import MemoryOptions
from verl.workers.engine.one_device import OneDeviceEngine


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_columns_gradient_and_steps_are_those_of_one_device(model_type, one_rank):
    for optimizer, steps, norm in ((SGD, 1, 1e9), (ADAM, 3, 0.5)):
        found = outcome(megatron_engine(model_type, optimizer, max_grad_norm=norm), steps=steps)
        expected = outcome(engine_alone(model_type, optimizer, max_grad_norm=norm), steps=steps)
        assert_same(found, expected)


def test_a_value_model_recomputed_and_offloaded_is_that_of_one_device(one_rank):
    def values(engine):
        data = rows()
        columns = engine.infer_batch(data, micro_batching=PASSES)["values"]
        results = [engine.train_batch(data, value_loss, micro_batching=PASSES) for _ in range(2)]
        return columns, [result.loss for result in results]

    memory = MemoryOptions(optimizer_offload=True, param_offload=True)
    options = {"is_value_model": True, "gradient_checkpointing": True, "memory": memory}
    found = values(megatron_engine("llama", ADAM, model=value_model, options=options))
    alone = OneDeviceEngine(value_model, ADAM, max_grad_norm=1e9, is_value_model=True)
    alone.initialize()
    expected = values(alone)
    close(found[0], expected[0], "values", 1e-5)
    close(found[1], expected[1], "losses", 1e-5)


def test_layouts_and_models_that_are_not_computed_right_are_refused_by_name(one_rank):
    with pytest.raises(ValueError, match="latent attention"):
        megatron_engine("deepseek_v3")
    layout = Layout(1, 1, None, 1, 2, 2, 4)
    with pytest.raises(ValueError, match="expert_tensor_parallel_size is 2"):
        refuse_layout(layout, tiny_config("qwen3_moe"))
    with pytest.raises(ValueError, match="LoRA"):
        refuse_model_options(McoreModelConfig(lora_rank=4))
    with pytest.raises(ValueError, match="auxiliary loss of the router"):
        refuse_model_options(HFModelConfig(override_config={"router_aux_loss_coef": 0.01}))


def test_roles_of_one_process_may_state_different_kernels_of_attention(one_rank, monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")
    monkeypatch.delenv("NVTE_FLASH_ATTN", raising=False)
    for backend in ("flash", "unfused"):
        stated = {"override_transformer_config": {"attention_backend": backend}}
        megatron_engine("llama", None, section=stated)
    assert environment.variable("NVTE_FUSED_ATTN") == "1"
    assert environment.variable("NVTE_FLASH_ATTN") == ""


def test_another_version_of_the_library_is_named(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.9.0")
    with pytest.raises(ValueError, match=r"megatron-core 0\.9\.0 is installed"):
        require_library()
