"""A policy in training whose rollout engine is SGLang: probed at the start, renewed by updates."""

from dataclasses import replace

import pytest

from tests.workers.roles.test_roles import RESPONSE, annotated, policy
from tests.workers.rollout.sglang.engines import PROTOCOL_SERVER, save_model
from verl.config.serving import ServerConfig
from verl.utils.environment import sglang_python
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.factory import ProcessEngineSpec, register_engine, sglang
from verl.workers.rollout.process.client import EngineSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@register_engine("sglang_protocol")
def sglang_protocol(order: ProcessEngineSpec) -> EngineSpec:
    """SGLang's engine over our protocol server."""
    spec = sglang(order)
    return replace(spec, options={**spec.options, "command": [PROTOCOL_SERVER]})


@pytest.mark.parametrize(
    "name",
    [
        "sglang_protocol",
        pytest.param(
            "sglang",
            marks=pytest.mark.skipif(
                sglang_python() is None, reason="VERL_SGLANG_PYTHON is not set"
            ),
        ),
    ],
)
def test_it_generates_with_the_trained_weights_after_every_update(tmp_path, name):
    is_real = name == "sglang"
    model_path = save_model(tmp_path, "qwen2")
    workers = policy(
        model_path,
        name=name,
        python=sglang_python() if is_real else None,
        server=ServerConfig(max_start_wait_time=500.0),
        gpu_memory_utilization=0.05,
    )
    try:
        for version in (0, 1, 2):
            assert workers.rollout_version() == [version]
            batch = annotated(workers)
            gap = batch.batch["old_log_probs"] - batch.batch["rollout_log_probs"]
            assert (gap * batch.batch["response_mask"]).abs().max() < 1e-4
            metrics = workers.update_actor(batch).meta_info["metrics"]
            assert max(metrics["rollout/canary_max_diff"]) < 1e-3
        params = SamplingParams(max_tokens=RESPONSE, temperature=0.0)
        request = GenerationRequest(request_id="a", prompt_ids=[5, 6], params=params)
        ((output,),) = workers.workers[0].rollout.generate_batch([request])
        assert set(output.policy_versions) == {3}
    finally:
        workers.workers[0].stop_rollout()
