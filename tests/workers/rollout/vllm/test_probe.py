"""What the probe finds out about a real vLLM."""

import pytest

from tests.workers.rollout.vllm.helpers import needs_vllm, saved_model, vllm_process
from verl.models.loading import load_causal_lm
from verl.utils.device import get_device_name
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.spec import compute_dtype
from verl.workers.rollout.probe import (
    METRIC,
    FixedPromptCheck,
    SamplingInUse,
    default_tolerance,
    probe_engine,
)
from verl.workers.rollout.trained import LocalPolicy

pytestmark = needs_vllm


@pytest.mark.parametrize(
    ("model_type", "has_weights"),
    [("llama", False), ("qwen2", True)],  # qwen2 has tied embeddings
)
def test_vllm_passes_the_probe_and_the_drift_check(model_type, has_weights, tmp_path):
    device = get_device_name()
    dtype, is_on_cpu = compute_dtype("auto", device), device == "cpu"
    tolerance = 0.01 if is_on_cpu else default_tolerance("bfloat16")
    saved_model(tmp_path, model_type)
    training = OneDeviceEngine(lambda: load_causal_lm(str(tmp_path), dtype=dtype, device=device))
    training.initialize()
    engine = vllm_process(
        tmp_path,
        has_weights=has_weights,
        prompt_length=160,
        response_length=32,
        dtype=str(dtype).removeprefix("torch."),
        gpu_memory_utilization=0.2,
    )
    facts = engine.start()
    assert facts.can_sleep != is_on_cpu
    try:
        policy = LocalPolicy(training, engine.update_weights)
        vocabulary = training.module.config.vocab_size
        findings = probe_engine(
            engine,
            policy,
            facts,
            vocabulary=vocabulary,
            tolerance=tolerance,
            sampling=SamplingInUse(),
        )
        assert findings[-1].answer == "they did"
        check = FixedPromptCheck(
            vocabulary=vocabulary, max_model_len=facts.max_model_len, tolerance=tolerance
        )
        assert check.check(engine, policy)[METRIC] < (1e-3 if is_on_cpu else tolerance)
        engine.sleep()
        engine.wake_up()
        policy.send(is_scrambled=False)
        check.check(engine, policy)
    finally:
        engine.close()
