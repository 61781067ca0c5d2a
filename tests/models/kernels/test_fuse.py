"""A fused model computes what the model computed before."""

import gc
import logging
import re
import weakref
from copy import deepcopy

import pytest
import torch
from torch import nn

from tests.models.kernels.devices import on_each_device
from tests.models.test_packed import LENGTHS, random_ids
from tests.tiny_models import VOCABULARY, tiny_model
from verl.models.forward import hidden_states, packed_positions
from verl.models.fuse import fuse_model
from verl.models.head import OutputHead, scaled_logits
from verl.models.packed import PackedLayout

FUSED = {
    "llama": ["Embedding", "LlamaAttention", "LlamaDecoderLayer", "LlamaMLP", "LlamaRMSNorm"],
    "qwen2": ["Embedding", "Qwen2Attention", "Qwen2DecoderLayer", "Qwen2MLP", "Qwen2RMSNorm"],
    "qwen3": ["Embedding", "Qwen3Attention", "Qwen3DecoderLayer", "Qwen3MLP", "Qwen3RMSNorm"],
    "mistral": [
        "Embedding",
        "MistralAttention",
        "MistralDecoderLayer",
        "MistralMLP",
        "MistralRMSNorm",
    ],
    "gemma": ["GemmaAttention", "GemmaDecoderLayer", "GemmaMLP", "GemmaRMSNorm"],
    "gemma2": ["Gemma2Attention", "Gemma2MLP", "Gemma2RMSNorm"],
}


def model_on(device, model_type):
    return tiny_model(model_type).to(device)


def logits_and_gradients(model):
    device = model.device
    layout = PackedLayout(LENGTHS, device)
    positions = packed_positions(LENGTHS).to(device)
    hidden = hidden_states(model, random_ids(LENGTHS).to(device), positions, layout)
    logits = scaled_logits(hidden, OutputHead.of(model), temperature=1.0)
    pull = torch.randn(sum(LENGTHS), VOCABULARY, generator=torch.Generator().manual_seed(5))
    model.zero_grad()
    (logits * pull.to(device)).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@on_each_device
@pytest.mark.parametrize("model_type", FUSED)
def test_a_fused_model_keeps_its_logits_gradients_and_parameters(device, model_type):
    model = model_on(device, model_type)
    keys = list(model.state_dict())
    parameters = list(model.parameters())
    expected_logits, expected_gradients = logits_and_gradients(model)
    assert sorted(fuse_model(model)) == FUSED[model_type]
    logits, gradients = logits_and_gradients(model)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
    assert not torch.equal(logits, expected_logits), "the kernels did not run"
    for name, expected in expected_gradients.items():
        torch.testing.assert_close(gradients[name], expected, rtol=1e-3, atol=1e-3, msg=name)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


@on_each_device
def test_the_rotary_kernel_runs_in_fused_models_only(device):
    from transformers.models.llama import modeling_llama

    from verl.models.fuse import SwitchedRotary

    fused, plain = model_on(device, "llama"), model_on(device, "llama")
    fuse_model(fused)
    rotary = modeling_llama.apply_rotary_pos_emb
    assert isinstance(rotary, SwitchedRotary)
    assert not isinstance(rotary.own, SwitchedRotary), "wrapped once, however many models are fused"
    calls, kernel = [], rotary.kernel
    rotary.kernel = lambda *tensors: (calls.append(1), kernel(*tensors))[1]
    try:
        logits_and_gradients(plain)
        assert calls == []
        logits_and_gradients(fused)
        assert calls == [1, 1], "one call in each of the two layers"
    finally:
        rotary.kernel = kernel


@on_each_device
def test_fusing_twice_changes_nothing(device):
    model = model_on(device, "qwen3")
    fuse_model(model)
    forwards = [module.forward for module in model.modules()]
    assert fuse_model(model) == []
    assert all(a == b for a, b in zip(forwards, (m.forward for m in model.modules()), strict=True))


@on_each_device
def test_a_copy_of_a_fused_model_reads_its_own_weights(device):
    model = model_on(device, "llama")
    fuse_model(model)
    twin = deepcopy(model)
    before, _ = logits_and_gradients(model)
    with torch.no_grad():
        twin.model.norm.weight.mul_(2)
    after, _ = logits_and_gradients(model)
    assert torch.equal(before, after)
    torch.testing.assert_close(logits_and_gradients(twin)[0], 2 * before, rtol=1e-4, atol=1e-5)


@on_each_device
def test_a_pass_that_fails_inside_attention_leaves_nothing_in_memory(device):
    model = model_on(device, "qwen3")
    fuse_model(model)
    attention, seen = model.model.layers[1].self_attn, []

    def run_out_of_memory(module, arguments):
        raise torch.OutOfMemoryError("between q and v")

    attention.q_proj.register_forward_pre_hook(lambda _, x: seen.append(weakref.ref(x[0])))
    hook = attention.q_norm.register_forward_pre_hook(run_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError, match="between q and v"):
        logits_and_gradients(model)
    gc.collect()
    assert [x() for x in seen] == [None]
    hook.remove()
    logits_and_gradients(model)


class HalvedRMSNorm(nn.Module):
    """Looks like a norm and is another function."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) / 2


class Gate(nn.Module):
    def __init__(self, act_fn, factor=1.0):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))
        self.act_fn = act_fn
        self.factor = factor

    def forward(self, x):
        gate = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(gate) * self.factor


class LoudRMSNorm(HalvedRMSNorm):
    def forward(self, x, residual):
        return x + residual


@on_each_device
@pytest.mark.parametrize(
    ("module", "notice"),
    [
        (HalvedRMSNorm(), "HalvedRMSNorm is not fused .* differs by 1.0e[+]00"),
        (LoudRMSNorm(), "LoudRMSNorm is not fused .* cannot be compared .*residual"),
        (Gate(nn.GELU()), "Gate is not fused .* differs by"),
        (Gate(nn.SiLU(), factor=2.0), "Gate is not fused .* differs by 5.0e-01"),
    ],
)
def test_a_look_alike_is_left_alone_with_a_notice(device, module, notice, caplog):
    module = deepcopy(module)
    model = nn.Sequential(nn.Linear(8, 8), module).to(device).bfloat16()
    with caplog.at_level(logging.WARNING):
        assert fuse_model(model) == []
    assert "forward" not in vars(module)
    assert len(caplog.records) == 1
    assert re.search(notice, caplog.text)


@on_each_device
@pytest.mark.parametrize("module", [Gate(nn.SiLU()), Gate(nn.GELU(approximate="tanh"))])
def test_the_activation_is_recognised_by_its_numbers(device, module):
    model = nn.Sequential(deepcopy(module)).to(device)
    x = torch.randn(3, 8, device=device)
    expected = model(x)
    assert fuse_model(model) == ["Gate"]
    torch.testing.assert_close(model(x), expected)
    assert all(p.grad is None for p in model.parameters()), "comparing leaves no gradients"


def test_nothing_is_fused_where_kernels_cannot_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = tiny_model("llama")
    assert fuse_model(model) == []
    assert not any("forward" in vars(module) for module in model.modules())
