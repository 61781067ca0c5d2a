"""Routers: replaying a selection, and what experts compute on several ranks or in a loop."""

from copy import deepcopy

import pytest
import torch

from tests.models.test_packed import LENGTHS, packed_logits, random_ids
from tests.tiny_models import tiny_model
from verl.models.experts import EXPERTS, expert_modules, prepare_experts, sort_pairs
from verl.models.routing import Routing, generation_pass

FAMILIES = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"]


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_pairs_are_sorted_by_expert_and_find_their_way_back():
    index = torch.tensor([[2, 0], [0, 3], [2, 3]])
    order, positions, ends = sort_pairs(index, 5)
    assert ends.tolist() == [2, 2, 4, 6, 6]
    assert index.flatten()[order].tolist() == [0, 0, 2, 2, 3, 3]
    assert torch.equal(index.flatten()[order][positions], index)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_experts_run_through_our_function(model_type):
    model = tiny_model(model_type)
    assert {m.config._experts_implementation for m in expert_modules(model).values()} == {EXPERTS}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_replaying_its_own_routes_changes_neither_logits_nor_gradients(model_type):
    model, ids = tiny_model(model_type), random_ids(LENGTHS)
    routing = Routing.of(model)
    routing.begin()
    logits = packed_logits(model, ids, LENGTHS)
    logits.square().sum().backward()
    expected, routes = gradients(model), routing.selected(len(ids))
    model.zero_grad()
    routing.begin(routes.to(torch.uint8))
    again = packed_logits(model, ids, LENGTHS)
    again.square().sum().backward()
    assert not any(layer.mismatches.any() for layer in routing.layers)
    torch.testing.assert_close(again, logits, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_other_routes_are_taken_and_their_weights_are_live(model_type):
    """Tokens go where they are sent, and the router learns from what it would have given them."""
    model, ids = tiny_model(model_type), random_ids(LENGTHS)
    routing = Routing.of(model)
    routing.begin()
    before = packed_logits(model, ids, LENGTHS)
    routes = (routing.selected(len(ids)) + 1) % routing.num_experts
    routing.begin(routes)
    after = packed_logits(model, ids, LENGTHS)
    assert torch.equal(routing.selected(len(ids)), routes)
    assert (after - before).abs().max() > 1e-3
    after.square().sum().backward()
    routers = [
        p for n, p in model.named_parameters() if n.endswith(("gate.weight", "router.weight"))
    ]
    assert routers
    assert all(p.grad.abs().max() > 0 for p in routers)
    routing.begin()
    torch.testing.assert_close(packed_logits(model, ids, LENGTHS), before)


def test_a_pass_of_the_rollout_engine_neither_replays_nor_is_recorded():
    model, ids = tiny_model("qwen3_moe"), random_ids(LENGTHS)
    routing = Routing.of(model)
    routing.begin()
    before = packed_logits(model, ids, LENGTHS)
    routing.begin((routing.selected(len(ids)) + 1) % 4)
    with generation_pass():
        inside = packed_logits(model, ids, LENGTHS)
    assert torch.equal(inside, before)
    assert routing.layers[0].selected is None


def test_recomputed_layers_take_the_same_routes():
    model, ids = tiny_model("qwen3_moe"), random_ids(LENGTHS)
    routing = Routing.of(model)
    routing.begin()
    packed_logits(model, ids, LENGTHS)
    routes = (routing.selected(len(ids)) + 1) % 4
    found = []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        model.zero_grad()
        routing.begin(routes)
        packed_logits(model, ids, LENGTHS).square().sum().backward()
        found.append(gradients(model))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, msg=name)


def test_a_copy_of_a_model_has_routers_of_its_own():
    model = tiny_model("qwen3_moe")
    prepare_experts(model)  # once more changes nothing
    copy = deepcopy(model)
    ids = random_ids(LENGTHS)
    routing, other = Routing.of(model), Routing.of(copy)
    routing.begin()
    other.begin()
    logits = packed_logits(model, ids, LENGTHS)
    assert other.layers[0].selected is None
    assert torch.equal(packed_logits(copy, ids, LENGTHS), logits)
    assert torch.equal(routing.selected(len(ids)), other.selected(len(ids)))
