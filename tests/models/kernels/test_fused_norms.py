"""Layers that norm their own sums give the bits of layers that do not, and the same gradients."""

import gc
import logging
import re
import weakref
from copy import deepcopy

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.models.kernels.devices import on_each_device
from tests.models.test_packed import random_ids
from tests.tiny_models import tiny_model
from verl.models import fused_norms
from verl.models.forward import hidden_states, packed_layout, packed_positions
from verl.models.fuse import fuse_model
from verl.models.fused_norms import FusedLayer, FusedNorm, Handover, LayerStack
from verl.models.lora import LoraOptions, add_lora

LENGTHS = [3, 2]


def fused(device, model_type="qwen2", **changes):
    model = tiny_model(model_type, **changes).to(device)
    fuse_model(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():  # so that one norm cannot pass for another
        for norm in stream_norms(model):
            norm.weight.add_(0.3 * torch.randn(norm.weight.shape, generator=generator).to(device))
    return model


def stream_norms(model):
    parts = [(x.input_layernorm, x.post_attention_layernorm) for x in model.model.layers]
    return [*(norm for pair in parts for norm in pair), model.model.norm]


def without_sums(model):
    """A copy with the same kernels, whose layers and their stack run their own code."""
    twin = deepcopy(model)
    for module in twin.modules():
        if isinstance(module.forward, FusedLayer | LayerStack):
            del module.forward
    return twin


def run(model):
    """The last hidden states, with a gradient for every parameter and for the embedded tokens."""
    ids, positions = (x.to(model.device) for x in (random_ids(LENGTHS), packed_positions(LENGTHS)))
    embedded = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: embedded.append(output)
    )
    hidden = hidden_states(model, ids, positions, packed_layout(model, LENGTHS))
    hook.remove()
    named = dict(model.named_parameters())
    if embedded[0].requires_grad:
        embedded[0].retain_grad()
        named["tokens"] = embedded[0]
    pull = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5))
    model.zero_grad()
    (hidden * pull.to(hidden)).sum().backward()
    return hidden.detach(), {name: p.grad for name, p in named.items() if p.grad is not None}


def count_kernels(norms):
    """Two lists: the norms that ran by themselves, and those that ran with the sum before them."""
    alone, summed = [], []
    for place, norm in enumerate(norms):
        forward = norm.forward
        for name, calls in (("kernel", alone), ("sum_kernel", summed)):
            setattr(forward, name, counted(getattr(forward, name), calls, place))
    return alone, summed


def counted(kernel, calls, place):
    def counting(*args):
        calls.append(place)
        return kernel(*args)

    return counting


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-3, msg=name)


@on_each_device
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma"])
def test_every_sum_is_normed_where_it_is_made_with_the_same_bits_and_gradients(device, model_type):
    model = fused(device, model_type)
    expected = run(without_sums(model))
    alone, summed = count_kernels(stream_norms(model))
    assert_same(run(model), expected)
    assert alone == [0], "only the embedded tokens are no sum"
    assert summed == [1, 2, 3, 4]


@pytest.mark.gpu
def test_in_bf16_the_bits_are_the_same():
    model = fused("cuda", "qwen2", hidden_size=896, num_attention_heads=14).bfloat16()
    assert torch.equal(run(model)[0], run(without_sums(model))[0])


@on_each_device
def test_a_model_in_bf16_is_fused_too(device):
    model = tiny_model("llama").to(device).bfloat16()
    assert "LlamaDecoderLayer" in fuse_model(model)


@on_each_device
def test_without_gradients_the_bits_are_the_same(device):
    model = fused(device)
    expected = run(without_sums(model))[0]
    alone, summed = count_kernels(stream_norms(model))
    ids, positions = (x.to(device) for x in (random_ids(LENGTHS), packed_positions(LENGTHS)))
    with torch.no_grad():
        found = hidden_states(model, ids, positions, packed_layout(model, LENGTHS))
    assert torch.equal(found, expected)
    assert (alone, summed) == ([0], [1, 2, 3, 4])


@on_each_device
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_that_are_computed_again_norm_only_sums_of_their_own(device, use_reentrant):
    model = fused(device)
    expected = run(without_sums(model))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.train()
    alone, summed = count_kernels(stream_norms(model))
    assert_same(run(model), expected)
    assert sorted(alone) == [0, 0, 2, 2, 4], "each layer twice; the last norm is outside of them"
    assert sorted(summed) == [1, 1, 3, 3]


@on_each_device
def test_frozen_weights_and_adapters_get_their_share(device):
    model = fused(device, "llama")
    add_lora(model, LoraOptions(rank=4, target_modules="all-linear"))
    expected = run(without_sums(model))
    alone, summed = count_kernels(stream_norms(model))
    found = run(model)
    assert_same(found, expected)
    assert all("lora_" in name for name in found[1] if name != "tokens")
    assert (alone, summed) == ([0], [1, 2, 3, 4])


@on_each_device
@pytest.mark.parametrize(
    ("place", "kind", "alone", "summed"),
    [
        ("layers.1", "forward_pre_hook", [0, 2, 4], [1, 3]),  # neither into the layer nor out of it
        ("layers.1.input_layernorm", "forward_hook", [0, 2], [1, 3, 4]),
        # The layer runs its own code.
        ("layers.0.post_attention_layernorm", "full_backward_hook", [0, 1, 2], [3, 4]),
        ("norm", "forward_hook", [0, 4], [1, 2, 3]),
    ],
)
def test_where_a_hook_is_nothing_runs_ahead_of_it(device, place, kind, alone, summed):
    model = fused(device)
    expected = run(without_sums(model))
    seen = []
    register = getattr(model.model.get_submodule(place), f"register_{kind}")
    register(lambda *call: seen.append(len(call)))
    counts = count_kernels(stream_norms(model))
    assert_same(run(model), expected)
    assert len(seen) == 1
    assert counts == (alone, summed)


class Shard(nn.Parameter):
    """A weight that is something else until a hook has gathered it."""


@on_each_device
def test_a_weight_that_is_not_a_plain_parameter_is_left_to_its_module(device):
    model = fused(device)
    expected = run(without_sums(model))
    for norm in (model.model.layers[0].post_attention_layernorm, model.model.norm):
        norm.weight = Shard(norm.weight.detach())
    alone, summed = count_kernels(stream_norms(model))
    assert_same(run(model), expected)
    assert (alone, summed) == ([0, 1, 2, 4], [3])


@on_each_device
def test_hidden_states_of_all_layers_can_be_asked_for(device):
    model = fused(device)
    ids, positions = (x.to(device)[None] for x in (random_ids(LENGTHS), packed_positions(LENGTHS)))
    found, expected = (
        m.model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            output_hidden_states=True,
            layout=packed_layout(m, LENGTHS),
        ).hidden_states
        for m in (model, without_sums(model))
    )
    assert len(found) == len(expected) == 3
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@on_each_device
def test_another_module_in_the_place_of_a_norm_is_called(device):
    model = fused(device)
    norms = stream_norms(model)
    first, second = model.model.layers
    first.post_attention_layernorm = nn.Sequential(first.post_attention_layernorm)
    second.input_layernorm = nn.Sequential(second.input_layernorm)
    expected = run(without_sums(model))
    alone, summed = count_kernels(norms)
    assert_same(run(model), expected)
    assert (alone, summed) == ([0, 1, 2], [3, 4])


@on_each_device
def test_a_layer_called_by_itself_leaves_nothing_behind(device):
    model = fused(device)
    layer, x = model.model.layers[0], torch.randn(1, 5, 32, device=device)
    tables = model.model.rotary_emb(x, torch.arange(5, device=device)[None])
    options = {"position_embeddings": tables, "layout": packed_layout(model, LENGTHS)}
    expected = without_sums(model).model.layers[0](x, **options)
    alone, summed = count_kernels(stream_norms(model))
    assert torch.equal(layer(x, **options), expected)
    assert (alone, summed) == ([0], [1])


@on_each_device
def test_the_tensor_that_waited_is_gone_after_a_pass(device):
    model = fused(device)
    made, forward = [], model.model.norm.forward
    kernel = forward.sum_kernel

    def remembered(*args):
        outputs = kernel(*args)
        made.extend(map(weakref.ref, outputs))
        return outputs

    forward.sum_kernel = remembered
    run(model)
    assert [ref() for ref in made] == [None, None]


class FailingStack(nn.Module):
    """A pass that ends between a layer and the norm behind it."""

    def forward(self, norm):
        handover = fused_norms._handover.get()
        self.handover = weakref.ref(handover)
        handover.put(norm, torch.zeros(2), torch.ones(2))
        raise RuntimeError("out of memory")


def test_nothing_waits_after_a_pass_that_failed():
    module = FailingStack()
    module.forward = LayerStack(module)
    with pytest.raises(RuntimeError, match="out of memory"):
        module(None)
    gc.collect()
    assert module.handover() is None
    assert fused_norms._handover.get(None) is None


def put_by(norm):
    handover, total, normed = Handover(), torch.zeros(2), torch.ones(2)
    handover.put(norm, total, normed)
    return handover, total, normed


@on_each_device
def test_what_waits_is_given_once_to_its_norm_for_its_tensor(device):
    model = fused(device)
    norm, other = (x.forward for x in stream_norms(model)[:2])
    assert isinstance(norm, FusedNorm)
    handover, total, normed = put_by(norm)
    assert handover.take(norm, total) is normed
    assert handover.take(norm, total) is None
    handover, total, _ = put_by(norm)
    assert handover.take(norm, total.clone()) is None
    assert handover.take(norm, total) is None, "what was not taken is gone"
    handover, total, _ = put_by(norm)
    assert handover.take(other, total) is None
    handover, total, _ = put_by(norm)
    with torch.no_grad():
        assert handover.take(norm, total) is None, "it has a graph that nobody asked for"


@on_each_device
@pytest.mark.parametrize(
    "model_type", ["gemma2", "gemma3_text", "olmo", "olmo2", "phi", "phi3", "gpt_oss"]
)
def test_layers_of_another_form_run_their_own_code(device, model_type):
    model = tiny_model(model_type).to(device)
    assert not any("DecoderLayer" in name for name in fuse_model(model))
    own = (FusedLayer, LayerStack)
    assert not any(isinstance(module.forward, own) for module in model.modules())


class Layer(GradientCheckpointingLayer):
    """The usual layer, made from a tiny one."""

    def __init__(self, layer):
        super().__init__()
        for name, child in layer.named_children():
            self.add_module(name, child)

    def forward(self, hidden_states, position_embeddings=None, **options):
        normed = self.input_layernorm(hidden_states)
        options["position_embeddings"] = position_embeddings
        attended, _ = self.self_attn(hidden_states=normed, **options)
        return self.finish(hidden_states, attended)

    def finish(self, x, attended):
        total = x + attended
        return total + self.mlp(self.post_attention_layernorm(total))


class ScaledLayer(Layer):
    factor = 0.9

    def finish(self, x, attended):
        return super().finish(x, self.factor * attended)


class TupleLayer(Layer):
    def finish(self, x, attended):
        return (super().finish(x, attended),)


class ParallelLayer(Layer):
    def finish(self, x, attended):
        return x + attended + self.mlp(self.post_attention_layernorm(x))


class SecretiveLayer(Layer):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **options):
        return super().forward(hidden_states, position_embeddings, **options)


class RoutedLayer(Layer):
    def finish(self, x, attended):
        total = x + attended
        change, _ = self.mlp(self.post_attention_layernorm(total))
        return total + change


def with_layers(device, kind):
    """The MLP's weights are 0 and attention's tiny, as after some initialisations."""
    model = tiny_model("llama", scale=1e-4)
    for index, layer in enumerate(model.model.layers):
        nn.init.zeros_(layer.mlp.down_proj.weight)
        model.model.layers[index] = kind(layer)
    return model.to(device)


@on_each_device
@pytest.mark.parametrize(
    ("kind", "notice"),
    [
        (ScaledLayer, "ScaledLayer is not fused .* differs by"),
        (TupleLayer, "TupleLayer is not fused .* more than hidden states"),
        (ParallelLayer, "ParallelLayer is not fused .* differs by"),
        (SecretiveLayer, "SecretiveLayer is not fused .* attention does not get"),
        (RoutedLayer, "RoutedLayer is not fused .* cannot be compared"),
    ],
)
def test_a_layer_that_looks_usual_and_is_not_is_left_alone_with_a_notice(
    device, kind, notice, caplog
):
    model = with_layers(device, kind)
    with caplog.at_level(logging.WARNING):
        assert kind.__name__ not in fuse_model(model)
    assert not any("forward" in vars(layer) for layer in model.model.layers)
    assert len(caplog.records) == 1
    assert re.search(notice, caplog.text)


@on_each_device
def test_a_layer_is_recognised_by_its_numbers(device):
    assert "Layer" in fuse_model(with_layers(device, Layer))
