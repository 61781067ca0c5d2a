import logging
import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from verl.utils import flops_counter
from verl.utils.flops_counter import FlopsCounter, get_device_flops

SHAPE = {
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VOCABULARY = 10 * 8  # the output matrix; the embedding is no product
ATTENTION = 8 * 2 * (4 + 4) + 8 * 2 * (2 + 2)  # query and output, key and value; d = 2
FEED_FORWARD = 3 * 8 * 16


def llama(**changes) -> SimpleNamespace:
    return SimpleNamespace(model_type="llama", **{**SHAPE, **changes})


def test_a_dense_model_by_hand():
    weights = VOCABULARY + 2 * (ATTENTION + FEED_FORWARD)
    linear = 6 * weights * (3 + 5)
    attention = 6 * (3**2 + 5**2) * 4 * 2 * 2  # 6 s^2 (heads * d) per layer
    assert FlopsCounter(llama()).step_flops([3, 5]) == linear + attention
    achieved, _ = FlopsCounter(llama()).estimate_flops([3, 5], delta_time=2.0)
    assert achieved == pytest.approx((linear + attention) / 2 / 1e12)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_count_is_what_torch_counts_in_a_forward_pass(is_tied):
    config = AutoConfig.for_model("llama", **SHAPE, tie_word_embeddings=is_tied)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(torch.arange(5)[None], use_cache=False)
    products = counted.get_flop_counts()["Global"]
    linear, attention = products[torch.ops.aten.mm], products[torch.ops.aten.bmm]
    # Eager attention computes the pairs that it masks, too.
    assert FlopsCounter(config).step_flops([5]) / 3 == linear + attention / 2


def test_only_the_experts_of_a_token_count():
    config = llama(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=5)
    experts = 3 * 8 * 5 * 2 + 8 * 6  # two experts and the router
    weights = VOCABULARY + 2 * (ATTENTION + experts)
    assert FlopsCounter(config).step_flops([1]) == 6 * weights + 6 * 4 * 2 * 2
    config.mlp_only_layers = [0]
    config.shared_expert_intermediate_size = 7
    weights = VOCABULARY + 2 * ATTENTION + FEED_FORWARD + experts + 3 * 8 * 7
    assert FlopsCounter(config).step_flops([1]) == 6 * weights + 6 * 4 * 2 * 2


def test_latent_attention_reaches_the_published_number_of_active_weights():
    config = AutoConfig.for_model("deepseek_v3")  # its defaults are the 671B model, 37B active
    per_token = FlopsCounter(config).step_flops([1] * 1000) / 6000
    embedding = config.vocab_size * config.hidden_size
    assert per_token + embedding == pytest.approx(37.55e9, rel=0.001)


def test_a_window_limits_what_attention_looks_at():
    full = FlopsCounter(llama())
    windowed = FlopsCounter(llama(sliding_window=4))
    assert windowed.step_flops([3]) == full.step_flops([3])
    pairs = 4 * 10 - 8
    assert full.step_flops([10]) - windowed.step_flops([10]) == 2 * 3 * (50 - pairs) * 2 * 4 * 4
    half = FlopsCounter(
        llama(sliding_window=4, layer_types=["full_attention", "sliding_attention"])
    )
    assert full.step_flops([10]) - half.step_flops([10]) == 3 * (50 - pairs) * 2 * 4 * 4


def test_the_text_part_of_a_multi_modal_model_counts(caplog):
    config = SimpleNamespace(model_type="some_vl", text_config=llama())
    with caplog.at_level(logging.WARNING):
        achieved, _ = FlopsCounter(config).estimate_flops([3], 1.0, images_seqlens=[7])
    assert achieved == FlopsCounter(llama()).estimate_flops([3], 1.0)[0]
    assert "images_seqlens: only the language model" in caplog.text


def test_an_unknown_shape_is_not_a_number_with_one_warning(caplog):
    flops_counter._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert math.isnan(FlopsCounter(SimpleNamespace(d_model=3)).step_flops([3]))
            linear = llama(layer_types=["linear_attention"] * 2)
            assert math.isnan(FlopsCounter(linear).step_flops([3]))
    assert len(caplog.records) == 2


def test_utilisation_is_the_share_of_the_peak_and_unknown_on_a_cpu(monkeypatch):
    counter = FlopsCounter(llama())
    assert counter.utilisation([3], 1.0) is None
    monkeypatch.setattr(flops_counter, "_current_device", lambda: "NVIDIA H200")
    whole = counter.step_flops([3, 5]) / 2.0 / 989e12
    assert counter.utilisation([3, 5], 2.0) == pytest.approx(whole)
    assert counter.utilisation([3, 5], 2.0, passes=1 / 3) == pytest.approx(whole / 3)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA GB200", 2500),
        ("Ascend910B3", 354),
    ],
)
def test_peaks_of_known_devices(name, tera):
    assert get_device_flops("T", name) == pytest.approx(tera)
    assert get_device_flops("G", name) == pytest.approx(tera * 1000)


def test_the_peak_of_an_unknown_device_is_infinite(caplog):
    flops_counter._peak.cache_clear()
    flops_counter._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert get_device_flops(device_name="NVIDIA RTX A4000") == math.inf
        assert get_device_flops(device_name="NVIDIA RTX A4000") == math.inf
    assert len(caplog.records) == 1
    with pytest.raises(ValueError, match="unit is 'X'"):
        get_device_flops("X")
