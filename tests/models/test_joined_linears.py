"""Several linear layers as one product: outputs, gradients and parameters stay those of each."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from verl.models.joined_linears import JoinedLinears, can_join


def layers(bias):
    torch.manual_seed(0)
    return [nn.Linear(6, size, bias=bias) for size in (4, 2, 3)]


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_of_the_layers_one_by_one(bias):
    linears, x = layers(bias), torch.randn(2, 5, 6)
    apart = copy.deepcopy(linears)
    JoinedLinears(linears).install()
    pulls = [torch.randn(2, 5, linear.out_features) for linear in linears]

    def outputs_and_gradients(modules):
        leaf = x.clone().requires_grad_()
        outputs = [module(leaf) for module in modules]
        torch.stack([(y * p).sum() for y, p in zip(outputs, pulls, strict=True)]).sum().backward()
        return [*outputs, leaf.grad, *(p.grad for module in modules for p in module.parameters())]

    for ours, theirs in zip(
        outputs_and_gradients(linears), outputs_and_gradients(apart), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_parameters_keep_their_identity_and_writes_are_seen_by_the_product():
    linears = layers(bias=True)
    before = [p for linear in linears for p in linear.parameters()]
    joined = JoinedLinears(linears)
    assert all(
        a is b for a, b in zip(before, (p for x in linears for p in x.parameters()), strict=True)
    )
    with torch.no_grad():
        linears[1].weight.fill_(2.0)
    assert (joined.weight[4:6] == 2.0).all()
    assert joined.is_whole


def test_a_layer_whose_weight_was_moved_computes_with_the_new_one():
    linears, x = layers(bias=False), torch.randn(3, 6)
    joined = JoinedLinears(linears)
    joined.install()
    linears[0].weight.data = torch.ones(4, 6)
    assert not joined.is_whole
    torch.testing.assert_close(linears[0](x), x.sum(1, keepdim=True).expand(3, 4))
    torch.testing.assert_close(linears[2](x), x @ linears[2].weight.t())


def test_a_layer_that_is_asked_about_another_input_does_not_answer_with_the_last_one():
    linears = layers(bias=True)
    JoinedLinears(linears).install()
    x, other = torch.randn(3, 6), torch.randn(3, 6)
    linears[0](x)
    torch.testing.assert_close(linears[1](other), other @ linears[1].weight.t() + linears[1].bias)


def test_nothing_of_a_pass_is_kept_once_every_layer_has_answered():
    linears = layers(bias=True)
    joined = JoinedLinears(linears)
    joined.install()
    x = torch.randn(3, 6)
    for linear in linears:
        linear(x)
    assert joined._pending is None


def test_what_a_broken_off_pass_has_computed_can_be_forgotten():
    linears = layers(bias=True)
    joined = JoinedLinears(linears)
    joined.install()
    x = torch.randn(3, 6)
    kept, expected = weakref.ref(x), linears[1](x).detach()
    linears[0](x)
    joined.forget()
    torch.testing.assert_close(linears[1](x), expected)
    del x
    assert kept() is None


@pytest.mark.parametrize("bias", [True, False])
def test_only_the_layers_hold_the_storage(bias):
    linears = layers(bias)
    joined = JoinedLinears(linears)
    storages = [StorageWeakRef(p.untyped_storage()) for p in linears[0].parameters()]
    for linear in linears:
        for parameter in linear.parameters():
            parameter.data = parameter.data.clone()
    assert all(storage.expired() for storage in storages)
    assert not joined.is_whole


def test_biases_that_were_moved_are_not_answered_with_the_old_ones():
    linears, x = layers(bias=True), torch.randn(3, 6)
    joined = JoinedLinears(linears)
    joined.install()
    linears[0].bias.data = torch.ones(4)
    assert not joined.is_whole
    torch.testing.assert_close(linears[0](x), x @ linears[0].weight.t() + 1)


def test_neighbours_in_memory_are_one_product_only_in_one_storage():
    linears, memory = layers(bias=False), torch.zeros(9 * 6)
    joined = JoinedLinears(linears)
    apart = [
        torch.frombuffer(rows.numpy(), dtype=torch.float32) for rows in memory.split([24, 12, 18])
    ]
    for linear, rows in zip(linears, apart, strict=True):
        linear.weight.data = rows.view_as(linear.weight)
    assert not joined.is_whole
    for linear, rows in zip(linears, memory.split([24, 12, 18]), strict=True):
        linear.weight.data = rows.view_as(linear.weight)
    assert joined.is_whole, "wherever that storage is"


def test_frozen_layers_get_no_gradient_and_the_input_still_does():
    linears = layers(bias=True)
    JoinedLinears(linears).install()
    for linear in linears:
        linear.requires_grad_(False)
    x = torch.randn(3, 6, requires_grad=True)
    linears[0](x).sum().backward()
    torch.testing.assert_close(x.grad, linears[0].weight.sum(0).expand(3, 6))
    assert all(p.grad is None for linear in linears for p in linear.parameters())


def test_only_plain_layers_of_one_input_and_dtype_are_joined():
    assert can_join(layers(bias=True))
    assert not can_join([nn.Linear(6, 2), nn.Linear(5, 2)])
    assert not can_join([nn.Linear(6, 2), nn.Linear(6, 2, bias=False)])
    assert not can_join([nn.Linear(6, 2), nn.Linear(6, 2, dtype=torch.bfloat16)])
    assert not can_join([nn.Linear(6, 2), nn.Sequential(nn.Linear(6, 2))])
