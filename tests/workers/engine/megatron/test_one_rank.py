"""Megatron on one rank computes what the engine on one device does."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.tiny_models import plain_twin, tiny_model
from tests.utils.checkpoint.test_on_ranks import manager_of
from tests.workers.engine.megatron.cases import (
    ADAM,
    PASSES,
    SGD,
    YARN,
    assert_same,
    close,
    engine_alone,
    megatron_engine,
    outcome,
    rows,
    value_loss,
    value_model,
)
from tests.workers.engine.test_one_device import weighted_sum
from verl.config.engine import McoreEngineConfig
from verl.config.model import McoreModelConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.utils import environment
from verl.workers.engine.megatron import require_library
from verl.workers.engine.megatron.engine import refuse_model_options
from verl.workers.engine.memory import MemoryOptions
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.outputs import Outputs
from verl.workers.engine.registry import EngineRegistry
from verl.workers.engine.routes import prepare_replay
from verl.workers.engine.spec import EngineSpec

ROUTER = "model.layers.0.mlp.gate.weight"


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "deepseek_v3"])
def test_columns_gradient_and_steps_are_those_of_one_device(model_type, one_rank):
    for optimizer, steps, norm in ((SGD, 1, 1e9), (ADAM, 3, 0.5)):
        found = outcome(megatron_engine(model_type, optimizer, max_grad_norm=norm), steps=steps)
        expected = outcome(engine_alone(model_type, optimizer, max_grad_norm=norm), steps=steps)
        assert_same(found, expected)


def test_everything_that_can_be_asked_for_is_that_of_one_device(one_rank):
    data = rows()
    data["their_ids"] = torch.stack([data["responses"], data["responses"].flip(0)], 2)
    outputs = Outputs(sum_pi_squared=True, top_k=3, log_probs_at="their_ids")
    found, expected = (
        engine.infer_batch(data, micro_batching=PASSES, temperature=0.8, outputs=outputs)
        for engine in (megatron_engine("llama"), engine_alone("llama"))
    )
    assert {"sum_pi_squared", "top_ids", "top_log_probs", "log_probs_at"} < found.keys()
    assert found.keys() == expected.keys()
    for name, column in expected.items():
        close(found[name], column, name, 1e-5)


def test_an_engine_built_from_a_spec_trains_as_on_one_device(tmp_path, one_rank):
    plain_twin(tiny_model("llama")).save_pretrained(tmp_path)
    spec = EngineSpec(
        model=McoreModelConfig(path=str(tmp_path)),
        engine=McoreEngineConfig(override_transformer_config={}),
        optimizer=SGD,
        device="cpu",
        backend="megatron",
        max_grad_norm=1e9,
    )
    assert_same(outcome(EngineRegistry.new(spec)), outcome(engine_alone("llama")))


def test_weights_of_a_checkpoint_alone_are_those_that_were_saved(tmp_path, one_rank):
    first, second = (megatron_engine("qwen2") for _ in range(2))
    first.train_batch(rows(), weighted_sum, micro_batching=PASSES)
    manager_of(first, save=["model"], load=[]).save_checkpoint(str(tmp_path))
    manager_of(second, save=["model"], load=["model"]).load_checkpoint(str(tmp_path))
    found, expected = (dict(e.get_per_tensor_param()) for e in (second, first))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


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


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"pad_token_id": None}),  # then token 0 is trained like any other
        ("qwen2", YARN),  # scales attention with its angles
        ("deepseek_v3", {**YARN, "q_lora_rank": None}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.3}),
        ("deepseek_v3", {"router_aux_loss_coef": 0.3}),
    ],
)
def test_a_variant_trains_as_on_one_device(model_type, changes, one_rank):
    """Layers are computed again, so routers run twice."""
    options = {"gradient_checkpointing": True}
    found = outcome(megatron_engine(model_type, ADAM, changes=changes, options=options), steps=3)
    assert_same(found, outcome(engine_alone(model_type, ADAM, changes=changes), steps=3))


def test_activations_may_wait_in_cpu_memory(one_rank):
    wide = {"intermediate_size": 2048}  # smaller ones are left where they are
    engine = megatron_engine(
        "llama", ADAM, changes=wide, options={"memory": MemoryOptions(activation_offload=True)}
    )
    assert engine.residency.activations is not None
    assert_same(outcome(engine), outcome(engine_alone("llama", ADAM, changes=wide)))


def test_the_auxiliary_loss_has_a_gradient(one_rank):
    plain, balanced = (
        outcome(megatron_engine("qwen3_moe", changes={"router_aux_loss_coef": coefficient}))
        for coefficient in (0.0, 0.3)
    )
    assert balanced["columns"]["aux losses"] > 0
    moved = balanced["weights"][ROUTER] - plain["weights"][ROUTER]
    assert abs(moved).max() > 1e-3


def test_a_frozen_router_stays_and_the_rest_is_trained(one_rank):
    engine = megatron_engine("qwen3_moe", ADAM, options={"freezes_routers": True})
    before = {n: w.clone() for n, w in engine.get_per_tensor_param()}
    engine.train_batch(rows(), weighted_sum, micro_batching=PASSES)
    stayed = [n for n, w in engine.get_per_tensor_param() if torch.equal(w, before[n])]
    assert stayed == [name for name in before if name.endswith(".mlp.gate.weight")]
    state = engine.state_dict()
    assert not [name for name in state["optimizer"]["masters"] if name in stayed]
    other = megatron_engine("qwen3_moe", ADAM)
    with pytest.raises(ValueError, match=r"differ in model\.layers\.0\.mlp\.gate\.weight"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="llama has no experts"):
        megatron_engine("llama", options={"freezes_routers": True})


def test_what_is_not_built_in_is_refused_by_name(one_rank):
    with pytest.raises(ValueError, match="LoRA"):
        refuse_model_options(McoreModelConfig(lora_rank=4))
    with pytest.raises(ValueError, match="routers of MegatronEngine choose by themselves"):
        prepare_replay(megatron_engine("qwen3_moe", None), "R2", is_exact=False)
    with pytest.raises(ValueError, match="Muon, which looks at whole matrices"):
        megatron_engine("llama", FSDPOptimizerConfig(optimizer="Muon"))
    engine = megatron_engine("llama", None)
    for ask in (engine.output_head, lambda: engine.response_states(rows())):
        with pytest.raises(ValueError, match=r"teacher is asked for, but .*strategy=megatron"):
            ask()
    with pytest.raises(ValueError, match="divergence over the whole vocabulary is asked for"):
        engine.infer_batch(rows(), micro_batching=PASSES, outputs=Outputs(states=True))
    section = {"use_dist_checkpointing": True, "dist_checkpointing_path": "/nowhere"}
    with pytest.raises(ValueError, match="routers of deepseek_v3 have an e_score_correction_bias"):
        megatron_engine("deepseek_v3", None, section=section)


def test_virtual_stages_get_a_multiple_of_the_stages_in_passes(one_rank):
    engine, passes = megatron_engine("llama", None), [[0, 1], [2, 3], [4, 5, 6]]

    def scheduled(**sizes):
        engine.layout = replace(engine.layout, **sizes)
        return engine.schedule(rows(), [4] * 7, passes)

    assert scheduled(pipeline=2) == passes
    assert scheduled(pipeline=2, virtual_pipeline=2) == [*passes, []]


def test_roles_of_one_process_may_state_different_kernels_of_attention(one_rank, monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")
    monkeypatch.delenv("NVTE_FLASH_ATTN", raising=False)
    for backend in ("flash", "unfused"):
        stated = {"override_transformer_config": {"attention_backend": backend}}
        megatron_engine("llama", None, section=stated)
    assert environment.variable("NVTE_FUSED_ATTN") == "1"
    assert environment.variable("NVTE_FLASH_ATTN") == ""


@pytest.mark.slow
def test_the_library_is_imported_without_its_warnings():
    code = "from verl.workers.engine import megatron; megatron.MegatronEngine"
    command = [sys.executable, "-W", "default", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (found.returncode, found.stderr) == (0, "")


def test_another_version_of_the_library_is_named(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.9.0")
    with pytest.raises(ValueError, match=r"megatron-core 0\.9\.0 is installed"):
        require_library()
