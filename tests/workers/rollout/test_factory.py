"""From `rollout.name` to the process that serves it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import save_tiny_model, tiny_tokenizer
from verl.config.rollout import MultiTurnConfig, RolloutConfig
from verl.config.serving import CheckpointEngineConfig, ServerConfig
from verl.workers.rollout.factory import (
    ModuleEngineSpec,
    engine_spec,
    has_own_process,
    native,
    native_limits,
    process_spec,
    ranks_per_engine,
    register_engine,
)
from verl.workers.rollout.native.cache import cache_budget
from verl.workers.rollout.process.client import EngineSpec
from verl.workers.rollout.process.native import build as build_native


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def rollout(name, **options):
    return RolloutConfig(name=name, prompt_length=6, response_length=8, **options)


@pytest.mark.parametrize("name", ["native_process", "vllm", "sglang"])
def test_every_engine_gets_the_interpreter_the_devices_and_the_timeouts_of_the_options(
    name, model_path
):
    options = rollout(
        name,
        python="~/envs/engine/bin/python",
        server=ServerConfig(max_start_wait_time=77.0),
        checkpoint_engine=CheckpointEngineConfig(update_weights_bucket_megabytes=3),
    )
    spec = engine_spec(
        options, model_path, device="cpu", has_weights=False, visible_devices=("2", "5")
    )
    assert spec.python == str(Path.home() / "envs/engine/bin/python")
    assert spec.environment["CUDA_VISIBLE_DEVICES"] == "2,5"
    assert (spec.start_seconds, spec.bucket_bytes, spec.has_weights) == (77.0, 3 << 20, False)


def test_some_engines_run_in_the_workers_process_and_unknown_ones_nowhere():
    assert [has_own_process(name) for name in ("native", "hf", "vllm")] == [False, False, True]
    with pytest.raises(ValueError, match=r"rollout\.name is 'trtllm'; known: hf, native, "):
        has_own_process("trtllm")


def test_ranks_have_an_engine_in_common_where_it_is_divided():
    size = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3}
    assert ranks_per_engine(rollout("vllm", **size)) == 6
    assert ranks_per_engine(rollout("native", **size)) == 2, "it has no pipeline"


def test_the_built_in_engine_in_a_process_has_one_device(model_path):
    options = rollout("native_process", tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match=r"rollout\.name=native shards the model"):
        engine_spec(options, model_path, device="cpu", has_weights=True)


def test_an_engine_of_ones_own_is_one_function(model_path):
    @register_engine("engine_of_this_test")
    def mine(order):
        return process_spec(order, build="mine:build", options={"seed": order.seed})

    options = rollout("engine_of_this_test")
    spec = engine_spec(options, model_path, device="cpu", has_weights=True, seed=9)
    assert isinstance(spec, EngineSpec)
    assert (spec.build, spec.options, spec.has_weights) == ("mine:build", {"seed": 9}, True)
    assert has_own_process("engine_of_this_test")


def test_weights_of_its_own_are_part_of_an_engines_memory():
    module = tiny_model("llama")
    order = ModuleEngineSpec(
        module=module,
        rollout=rollout("native"),
        tokenizer=tiny_tokenizer(),
        version=lambda: 0,
    )
    shared, own = (native(replace(order, owns_module=owns)) for owns in (False, True))
    taken = shared.limits.max_cache_bytes - own.limits.max_cache_bytes
    assert taken == sum(weight.nbytes for weight in module.parameters())


def test_so_they_are_in_a_process_of_its_own(model_path):
    options = engine_spec(
        rollout("native_process"), model_path, device="cpu", has_weights=True
    ).options
    engine = build_native(options).engine
    weights = sum(weight.nbytes for weight in engine.runner.module.parameters())
    assert engine.limits.max_cache_bytes == options["limits"]["max_cache_bytes"] - weights


@pytest.mark.parametrize("is_multi_turn", [False, True])
def test_conversations_share_the_memory_with_what_runs(is_multi_turn):
    options = rollout("native", multi_turn=MultiTurnConfig(enable=is_multi_turn))
    limits = native_limits(options, torch.device("cpu"))
    budget = cache_budget(torch.device("cpu"), options.gpu_memory_utilization)
    if is_multi_turn:
        assert limits.max_session_bytes == budget // 2
        assert limits.max_cache_bytes + limits.max_session_bytes == budget
    else:
        assert limits.max_cache_bytes == budget
