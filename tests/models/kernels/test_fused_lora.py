"""Adapters on a fused model: none is left out, whichever layers have one."""

import pytest
import torch

from tests.models.kernels.devices import on_each_device
from tests.models.test_packed import LENGTHS, random_ids
from tests.tiny_models import tiny_model
from tests.workers.rollout.test_kernel_batch import outputs
from verl.models.forward import hidden_states, packed_layout, packed_positions
from verl.models.fuse import fuse_model
from verl.models.lora import LoraOptions, adapter_weights, add_lora, without_adapters

TARGETS = [["gate_proj"], ["up_proj"], ["q_proj", "v_proj"], ["k_proj"], "all-linear"]


def with_lora(device, target, *, is_fused):
    model = tiny_model("llama").to(device)
    if is_fused:
        assert fuse_model(model)
    add_lora(model, LoraOptions(rank=4, target_modules=target))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in adapter_weights(model).values():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator).to(device))
    return model


def logits(model):
    ids, positions = (x.to(model.device) for x in (random_ids(LENGTHS), packed_positions(LENGTHS)))
    hidden = hidden_states(model, ids, positions, packed_layout(model, LENGTHS))
    return model.get_output_embeddings()(hidden)


def gradients(model):
    """Of a random loss on the logits."""
    result = logits(model)
    pull = torch.randn(result.shape, generator=torch.Generator().manual_seed(5))
    (result * pull.to(model.device)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@on_each_device
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_fused_model_runs_and_trains_its_adapters(device, target):
    plain, fused = (with_lora(device, target, is_fused=is_fused) for is_fused in (False, True))
    torch.testing.assert_close(logits(fused), logits(plain), rtol=1e-4, atol=1e-4)
    found, expected = gradients(fused), gradients(plain)
    assert found.keys() == expected.keys()
    assert all("lora_" in name for name in found)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-3, msg=name)
    with without_adapters(fused):
        bare = logits(fused)
    assert not torch.allclose(bare, logits(fused), atol=1e-2), "the adapters make a difference"


@on_each_device
def test_the_engine_generates_with_the_adapters(device):
    model = with_lora(device, "all-linear", is_fused=True)
    plain_class, expected = outputs(model, {}, plain=True)
    kernel_class, found = outputs(model, {}, plain=False)
    assert (plain_class, kernel_class) == ("RunningBatch", "KernelBatch")
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=2e-5)
    with without_adapters(model):
        _, bare = outputs(model, {}, plain=True)
    assert [o.log_probs for o in bare] != [o.log_probs for o in expected]
