"""Compiled modules give the numbers of the module's own code, and only where they are switched on.

Importing the compiler alone takes seconds, so most of these are slow.
"""

import pytest
import torch

from tests.tiny_models import tiny_model
from tests.workers.engine.test_one_device import batch, engine, weighted_sum
from verl.models.fuse import CompiledForward, CompiledLayers, fits
from verl.workers.engine.base import MicroBatching

CUT = MicroBatching(rows=3)
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own insides


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_log_probs_and_gradients_are_those_of_the_eager_model_to_rounding(checkpointing):
    eager, compiled = (engine("phi3", gradient_checkpointing=checkpointing) for _ in range(2))
    layers = CompiledLayers(compiled.module)
    assert layers.names == ["Phi3MLP", "Phi3RMSNorm"]
    compiled._compiled = layers
    expected = eager.infer_batch(batch(), micro_batching=CUT)
    found = compiled.infer_batch(batch(), micro_batching=CUT)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)
    results = [b.train_batch(batch(), weighted_sum, micro_batching=CUT) for b in (eager, compiled)]
    assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=1e-4)
    for a, b in zip(compiled.module.parameters(), eager.module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_outside_of_training_and_scoring_passes_the_own_code_runs():
    model = tiny_model("phi3")
    layers = CompiledLayers(model)
    forward = model.model.layers[0].mlp.forward
    assert isinstance(forward, CompiledForward)
    seen = []
    forward._compiled, forward._own = (
        (lambda x: seen.append("compiled") or x),
        (lambda x: seen.append("own") or x),
    )
    forward(torch.ones(1))
    with layers.on():
        forward(torch.ones(1))
    with pytest.raises(ValueError, match="on purpose"), layers.on():
        raise ValueError("on purpose")
    forward(torch.ones(1))
    assert seen == ["own", "compiled", "own"]


def test_norms_and_mlps_of_the_architecture_are_compiled_and_experts_are_not():
    def kinds(model_type):
        return sorted({type(m).__name__ for m in tiny_model(model_type).modules() if fits(m)})

    assert kinds("phi") == ["PhiMLP"], "its norms are torch.nn.LayerNorm"
    assert kinds("olmo") == ["OlmoLayerNorm", "OlmoMLP"]
    assert kinds("gpt_oss") == ["GptOssRMSNorm"]


@pytest.mark.slow
def test_nothing_is_compiled_twice():
    model = tiny_model("phi")
    layers = CompiledLayers(model)
    assert layers.names == ["PhiMLP"]
    assert CompiledLayers(model).names == []


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_a_gpu_the_compiled_modules_agree_with_the_eager_ones_in_bf16():
    from verl.config.optimizer import FSDPOptimizerConfig
    from verl.models.fuse import fuse_model
    from verl.workers.engine.memory import MemoryOptions
    from verl.workers.engine.one_device import OneDeviceEngine

    def build():
        model = tiny_model("phi3").cuda().bfloat16()
        fuse_model(model)
        return model

    def built(use_torch_compile):
        made = OneDeviceEngine(
            build,
            FSDPOptimizerConfig(lr=0.1, optimizer="SGD", weight_decay=0.0),
            gradient_checkpointing=True,
            memory=MemoryOptions(use_torch_compile=use_torch_compile),
        )
        made.initialize()
        return made

    eager, compiled = built(False), built(True)
    assert eager.residency.compiled is None
    assert compiled.residency.compiled is not None
    assert compiled.residency.compiled.names == ["Phi3MLP"], "the norm has a kernel"
    data = batch().cuda()
    for cut in (CUT, MicroBatching(rows=2)):
        results = [
            made.train_batch(data, weighted_sum, micro_batching=cut) for made in (eager, compiled)
        ]
        assert results[1].loss == pytest.approx(results[0].loss, rel=0.05, abs=0.05)
        assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=0.05)
