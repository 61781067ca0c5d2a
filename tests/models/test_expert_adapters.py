"""Adapters on experts: every expert has its own, in training, in exact mode, on disk, merged."""

from copy import deepcopy

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model

from tests.models.test_lora import IDS, logits, with_lora
from tests.tiny_models import plain_twin, tiny_model
from verl.config.model import HFModelConfig
from verl.models.exact import make_exact
from verl.models.expert_adapters import adapts_experts
from verl.models.forward import hidden_states, packed_layout
from verl.models.lora import (
    LoraOptions,
    adapter_weights,
    add_lora,
    as_started,
    hf_weights,
    load_adapter,
    lora_options,
    merged_copy,
    save_adapter,
    without_adapters,
)
from verl.workers.rollout.engine_weights import adapter_config

FAMILIES = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"]
EXPERTS = ["all-linear", "experts"]


def adapted(model_type, **options):
    return with_lora(model_type, scale=0.1, target_modules=EXPERTS, **options)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_rows_take_their_own_experts_adapters(model_type):
    """peft adds every product to its expert's weight; rows through the factors give the same."""
    model = adapted(model_type)
    assert adapts_experts(model)
    reference = plain_twin(tiny_model(model_type))
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=sorted(model.peft_config["default"].target_modules),
        target_parameters=sorted(model.peft_config["default"].target_parameters),
    )
    inject_adapter_in_model(config, reference)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(own[name])
    expected = reference(IDS[None]).logits[0]
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(merged_copy(model)), logits(model), rtol=1e-4, atol=1e-5)
    with without_adapters(model):
        assert torch.equal(logits(model), logits(tiny_model(model_type)))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_the_factors_of_an_expert_have_the_gradient_of_the_chain_rule(model_type):
    """W' = W + s B A, so dB = s G A^T and dA = s B^T G; transposed tensors have G transposed."""
    model, scale = adapted(model_type), 2.0
    merged = merged_copy(model).requires_grad_(True)
    for one in (model, merged):
        logits(one).square().sum().backward()
    layer = "model.layers.1.mlp.experts"
    G = merged.get_parameter(f"{layer}.gate_up_proj").grad  # (E, out, in)
    G = G.transpose(1, 2) if merged.get_submodule(layer).is_transposed else G
    inner = model.get_submodule(f"{layer}.base_layer")
    A, B = inner.lora_A["default"].weight, inner.lora_B["default"].weight
    assert inner.parameter_name == "gate_up_proj"
    for expert in range(4):
        a, b = A[4 * expert : 4 * expert + 4], B[:, expert::4]
        torch.testing.assert_close(
            A.grad[4 * expert : 4 * expert + 4], scale * b.T @ G[expert], rtol=1e-3, atol=1e-4
        )
        torch.testing.assert_close(
            B.grad[:, expert::4], scale * G[expert] @ a.T, rtol=1e-3, atol=1e-4
        )
    assert A.grad.abs().max() > 1e-3
    trained = [name for name, p in model.named_parameters() if p.grad is not None]
    assert all(".lora_" in name for name in trained)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_peft_loads_what_was_saved(model_type, tmp_path):
    model = adapted(model_type)
    save_adapter(model, tmp_path)
    loaded = PeftModel.from_pretrained(plain_twin(tiny_model(model_type)), str(tmp_path))
    torch.testing.assert_close(loaded(IDS[None]).logits[0], logits(model), rtol=1e-4, atol=1e-5)


def test_a_stored_adapter_goes_on_where_it_was_and_is_kept_as_the_start(tmp_path):
    stored = adapted("qwen3_moe")
    save_adapter(stored, tmp_path)
    options = LoraOptions(adapter_path=str(tmp_path))
    model = add_lora(tiny_model("qwen3_moe"), options, keeps_start=True)
    assert torch.equal(logits(model), logits(stored))
    with torch.no_grad():
        for weight in adapter_weights(model).values():
            weight.mul_(2)
    assert not torch.allclose(logits(model), logits(stored))
    with as_started(model):
        assert torch.equal(logits(model), logits(stored))
    assert dict(hf_weights(model)).keys() == dict(tiny_model("qwen3_moe").named_parameters()).keys()
    load_adapter(model, tmp_path)
    assert torch.equal(logits(model), logits(stored))


def test_in_exact_mode_a_row_does_not_depend_on_those_beside_it():
    model = make_exact(adapted("qwen3_moe"), 16)
    whole = logits(model)
    torch.testing.assert_close(whole, logits(adapted("qwen3_moe")), rtol=1e-4, atol=1e-5)


def test_engines_that_are_sent_adapters_get_none_of_experts():
    attention = with_lora("qwen3_moe", target_modules=["q_proj"])
    assert adapter_config(attention)["target_modules"] == ["q_proj"]
    with pytest.raises(ValueError, match=r"lora\.merge=True"):
        adapter_config(adapted("qwen3_moe"))


def test_experts_are_named_among_the_target_modules():
    text = HFModelConfig(lora_rank=1, target_modules="all-linear,experts")
    assert lora_options(text).target_modules == EXPERTS
    model = with_lora("deepseek_v3", target_modules=["experts"])
    names = {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert all(".mlp.experts" in name for name in names)
    with pytest.raises(ValueError, match="LlamaForCausalLM has none"):
        with_lora("llama", target_modules=["experts"])


@pytest.mark.gpu
def test_adapted_experts_on_a_gpu_are_those_of_a_cpu():
    """In bf16; a rank of 8 fits torch's grouped product, 4 takes our kernel.

    The loss is a random projection: the square of what a norm returns is constant, and so the
    gradient of its mean would be rounding error alone.
    """
    projection = torch.randn(len(IDS), 32, generator=torch.Generator().manual_seed(3))
    for rank in (4, 8):
        options = LoraOptions(rank=rank, alpha=8, target_modules=EXPERTS)
        model = add_lora(tiny_model("qwen3_moe", scale=0.1), options)
        with torch.no_grad():
            for weight in adapter_weights(model).values():
                weight.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(7))
        fast = deepcopy(model).to("cuda", torch.bfloat16)
        positions = torch.arange(len(IDS))
        losses = []
        for one, device in ((model, "cpu"), (fast, "cuda")):
            layout = packed_layout(one, [len(IDS)])
            hidden = hidden_states(one, IDS.to(device), positions.to(device), layout)
            losses.append((hidden.float() * projection.to(device)).sum())
            losses[-1].backward()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=0.05)
        expected = dict(model.named_parameters())
        for name, parameter in fast.named_parameters():
            if ".experts" in name and parameter.grad is not None:
                wanted = expected[name].grad
                error = (parameter.grad.float().cpu() - wanted).norm() / wanted.norm()
                assert error < 0.1, name
