"""Models that cannot be sharded are refused by name; whole weights are loaded into shards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.tiny_models import tiny_model
from tests.utils.two_ranks import run_on_two_ranks
from verl.models.exact import make_exact
from verl.models.tensor_parallel import load_weights, shard_model


class Adapted(nn.Module):
    """A layer that is not a plain linear one."""

    def __init__(self, base):
        super().__init__()
        self.base = base


def adapted():
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj = Adapted(model.model.layers[1].mlp.up_proj)
    return model


def planned(name, style):
    """With another plan for one kind of layer."""
    model = tiny_model("llama")
    plan = {**model.config.base_model_tp_plan, f"layers.*.{name}": style}
    model.config.base_model_tp_plan = plan
    return model


def planned_for_others():
    model = tiny_model("llama")
    model.config.base_model_tp_plan = {"blocks.*.attention.q": "colwise"}
    return model


REFUSED = {
    "GptOssForCausalLM cannot be sharded across ranks: its plan in transformers does not exist": (
        lambda: tiny_model("gpt_oss")
    ),
    "LlamaForCausalLM cannot be sharded across ranks: its plan in transformers shards layers by "
    "'mla_kv_a_proj'": lambda: planned("mlp.up_proj", "mla_kv_a_proj"),
    "must divide the 3 attention heads of the model, which are sharded across ranks; possible are "
    "1, 3": lambda: tiny_model(
        "llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=24
    ),
    "(2) must divide the 49 features of model.layers.0.mlp.gate_proj": (
        lambda: tiny_model("llama", intermediate_size=49)
    ),
    "names layers that it does not have (blocks.*.attention.q)": planned_for_others,
    "turn exact mode off": lambda: make_exact(tiny_model("llama"), capacity=32),
    "model.layers.1.mlp.up_proj is a Adapted": adapted,
}


def test_models_that_cannot_be_sharded_are_refused_by_name(tmp_path):
    def work(rank):
        del rank
        return [message(shard_model, build(), dist.group.WORLD) for build in REFUSED.values()]

    for messages in run_on_two_ranks(work, tmp_path):
        for found, expected in zip(messages, REFUSED, strict=True):
            assert expected in found


def test_a_layer_that_computes_several_of_query_key_and_value_is_refused(tmp_path):
    def work(rank):
        del rank
        model = planned("self_attn.qkv_proj", "colwise")
        model.model.layers[0].self_attn.qkv_proj = nn.Linear(32, 64)
        return message(shard_model, model, dist.group.WORLD)

    for found in run_on_two_ranks(work, tmp_path):
        assert "qkv_proj computes more than one of query, key and value" in found


def test_whole_weights_find_their_part_and_strange_ones_are_refused(tmp_path):
    def work(rank):
        del rank
        model, whole = tiny_model("qwen2"), tiny_model("qwen2")
        shard_model(shard_model(model, dist.group.WORLD), dist.group.WORLD)  # once is enough
        loaded = tiny_model("qwen2").to("meta")
        shard_model(loaded, dist.group.WORLD)
        loaded = loaded.to_empty(device="cpu")
        loaded.tie_weights()
        weights = list(whole.named_parameters())
        load_weights(loaded, [*weights, ("lm_head.weight", whole.lm_head.weight)])
        parts = dict(model.named_parameters())
        same = [torch.equal(part, parts[name]) for name, part in loaded.named_parameters()]
        faults = [
            message(load_weights, loaded, [("model.layers.9.norm.weight", torch.zeros(3))]),
            message(load_weights, loaded, [("model.norm.weight", torch.zeros(3))]),
        ]
        return all(same), len(same), faults, parts["model.layers.0.mlp.down_proj.weight"].numpy()

    down = tiny_model("qwen2").model.layers[0].mlp.down_proj.weight.detach()
    answers = run_on_two_ranks(work, tmp_path)
    for is_same, count, faults, _ in answers:
        assert is_same
        assert count == len(list(tiny_model("qwen2").named_parameters()))
        assert "Qwen2ForCausalLM has no weight 'model.layers.9.norm.weight'" in faults[0]
        assert "weight 'model.norm.weight' has shape (3,)" in faults[1]
    parts = [torch.tensor(part) for *_, part in answers]
    assert torch.equal(torch.cat(parts, dim=1), down)


def test_weights_of_a_model_that_is_not_sharded_are_written_in_place():
    model, source = tiny_model("llama"), tiny_model("llama", scale=0.1)
    addresses = [p.data_ptr() for p in model.parameters()]
    load_weights(model, source.named_parameters())
    assert [p.data_ptr() for p in model.parameters()] == addresses
    for name, parameter in source.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)


def message(call, *arguments):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller looks at the text
        call(*arguments)
    return str(caught.value)
