"""Adapters: they start as nothing, are all that is trained, and come back from disk."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import plain_twin, tiny_config, tiny_model
from verl.models.forward import hidden_states, packed_layout
from verl.models.loading import random_causal_lm
from verl.models.lora import (
    LoraOptions,
    adapter_weights,
    add_lora,
    as_started,
    has_lora,
    hf_weights,
    load_adapter,
    merged_copy,
    save_adapter,
    without_adapters,
)
from verl.utils.checkpoint.hf_model import save_hf_model

IDS = torch.tensor([5, 9, 3, 7, 8])


def with_lora(model_type="llama", *, seed=0, scale=0.0, **options):
    """A model with adapters; `scale` makes them differ from nothing."""
    model = add_lora(tiny_model(model_type), LoraOptions(rank=4, alpha=8, **options), seed=seed)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in adapter_weights(model).values():
            weight.add_(scale * torch.randn(weight.shape, generator=generator))
    return model


def logits(model):
    positions = torch.arange(len(IDS))
    hidden = hidden_states(model, IDS, positions, packed_layout(model, [len(IDS)]))
    return model.get_output_embeddings()(hidden)


def test_a_model_with_fresh_adapters_computes_what_it_did():
    assert torch.equal(logits(with_lora()), logits(tiny_model("llama")))
    assert has_lora(with_lora())
    assert not has_lora(tiny_model("llama"))


def test_only_adapters_are_trained():
    model = with_lora()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    # 2 layers of q, k, v, o, gate, up, down; widths 32, 16 (k, v) and 48; rank 4
    sizes = [32 + 32, 32 + 16, 32 + 16, 32 + 32, 32 + 48, 32 + 48, 48 + 32]
    assert sum(w.numel() for w in adapter_weights(model).values()) == 2 * 4 * sum(sizes)


def test_the_seed_decides_the_adapters_and_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    one, same, other = (adapter_weights(with_lora(seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])


def test_a_merged_weight_is_the_base_plus_the_scaled_product():
    model = with_lora(scale=0.1)
    weights = adapter_weights(model)
    name = "base_model.model.model.layers.1.mlp.up_proj"
    down, up = weights[f"{name}.lora_A.weight"], weights[f"{name}.lora_B.weight"]
    base = tiny_model("llama").model.layers[1].mlp.up_proj.weight
    merged = merged_copy(model).model.layers[1].mlp.up_proj.weight
    torch.testing.assert_close(merged, base + 8 / 4 * up @ down)
    torch.testing.assert_close(logits(merged_copy(model)), logits(model))
    assert not torch.equal(merged, base)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2"])  # qwen2: tied embeddings
def test_the_merged_export_loads_anywhere_and_computes_the_same(model_type, tmp_path):
    model = with_lora(model_type, scale=0.1)
    save_hf_model(merged_copy(model), None, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    expected = plain_twin(merged_copy(model))(IDS[None]).logits
    torch.testing.assert_close(loaded(IDS[None]).logits, expected)
    if model_type != "gemma2":  # whose logits are capped after the output layer
        torch.testing.assert_close(logits(model), loaded(IDS[None]).logits[0])


def test_what_has_no_adapter_is_not_copied():
    model = with_lora(target_modules=["q_proj"])
    copy = merged_copy(model)
    shared, merged = copy.model.layers[0].mlp.up_proj, copy.model.layers[0].self_attn.q_proj
    assert shared.weight.data_ptr() == model.model.layers[0].mlp.up_proj.weight.data_ptr()
    own = model.model.layers[0].self_attn.q_proj.get_base_layer().weight
    assert merged.weight.data_ptr() != own.data_ptr()


def test_peft_loads_the_saved_adapter(tmp_path):
    from peft import PeftModel

    model = with_lora(scale=0.1)
    save_adapter(model, tmp_path)
    loaded = PeftModel.from_pretrained(plain_twin(tiny_model("llama")), str(tmp_path))
    torch.testing.assert_close(loaded(IDS[None]).logits[0], logits(model))
    assert loaded.peft_config["default"].lora_alpha == 8


def test_a_saved_adapter_comes_back_in_place(tmp_path):
    model, other = with_lora(scale=0.1), with_lora(seed=5)
    save_adapter(model, tmp_path)
    addresses = [p.data_ptr() for p in other.parameters()]
    load_adapter(other, tmp_path)
    assert [p.data_ptr() for p in other.parameters()] == addresses
    assert torch.equal(logits(other), logits(model))


def test_an_adapter_of_another_form_is_refused(tmp_path):
    save_adapter(with_lora(), tmp_path)
    other = add_lora(tiny_model("llama"), LoraOptions(rank=2))
    with pytest.raises(ValueError, match=r"lora_A.weight is \[4, 32\] there and \[2, 32\] here"):
        load_adapter(other, tmp_path)


@pytest.mark.parametrize(
    ("target", "complaint"),
    [("lm_head", "lm_head, the output layer"), ("embed_tokens", "which is Embedding")],
)
def test_layers_that_cannot_have_an_adapter_are_refused(target, complaint):
    with pytest.raises(ValueError, match=complaint):
        with_lora(target_modules=[target])


def test_experts_get_no_adapter_unless_they_are_named_and_attention_beside_them_does(caplog):
    with pytest.raises(ValueError, match=r"names 'gate_proj', but experts .* name 'experts'"):
        with_lora("qwen3_moe", target_modules=["gate_proj", "up_proj", "down_proj"])
    for targets in ({}, {"target_modules": ["q_proj"]}):
        model = with_lora("qwen3_moe", **targets, scale=0.1)
        torch.testing.assert_close(logits(merged_copy(model)), logits(model))
    assert "experts and routers stay frozen" in caplog.text


def test_a_model_without_weights_gets_adapters_without_weights(tmp_path):
    """As ranks need it that are given their part of the weights later."""
    save_adapter(with_lora(scale=0.1), tmp_path)
    with torch.device("meta"):
        empty, other = (random_causal_lm(tiny_config("llama")) for _ in range(2))
    add_lora(empty, LoraOptions(rank=4))
    add_lora(other, LoraOptions(adapter_path=str(tmp_path)), keeps_start=True)
    assert {p.device.type for p in (*empty.parameters(), *other.parameters())} == {"meta"}
    trained = [
        {name for name, p in m.named_parameters() if p.requires_grad} for m in (empty, other)
    ]
    assert trained[0] == trained[1]


def test_a_model_runs_as_it_started_whatever_became_of_its_adapters(tmp_path):
    stored = with_lora(scale=0.1)
    save_adapter(stored, tmp_path)
    options = LoraOptions(adapter_path=str(tmp_path))
    model = add_lora(tiny_model("llama"), options, keeps_start=True)
    assert adapter_weights(model).keys() == adapter_weights(stored).keys()
    with torch.no_grad():
        for weight in adapter_weights(model).values():
            weight.mul_(2)
    with as_started(model):
        assert torch.equal(logits(model), logits(stored))
    with without_adapters(model):
        assert torch.equal(logits(model), logits(tiny_model("llama")))
    assert not torch.allclose(logits(model), logits(stored))
    merged = dict(hf_weights(model))
    assert merged.keys() == dict(tiny_model("llama").named_parameters()).keys()
    torch.testing.assert_close(logits(merged_copy(model)), logits(model))
