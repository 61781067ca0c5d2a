"""Waiting in CPU memory changes where numbers are, never what they are."""

import copy

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.tiny_models import tiny_model
from tests.workers.engine.test_one_device import batch, weighted_sum
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.joined_linears import JoinedLinears
from verl.utils.checkpoint.tensor_store import load_state, save_state
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.memory import MemoryOptions
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.optimizer import MasterOptimizer
from verl.workers.engine.residency import SMALL_ACTIVATION, OffloadedActivations, OffloadedWeights

CUT = MicroBatching(rows=3)
ADAM = FSDPOptimizerConfig(lr=0.01, weight_decay=0.1)


def built(optimizer=ADAM, dtype=torch.float32, checkpointing=False, **memory):
    engine = OneDeviceEngine(
        lambda: tiny_model("qwen2").to(dtype),
        optimizer,
        memory=MemoryOptions(**memory),
        gradient_checkpointing=checkpointing,
    )
    engine.initialize()
    return engine


def weights_after_steps(engine, steps=3):
    def small(columns, rows):  # within fp16's range when it is scaled up
        return weighted_sum(columns, rows)[0] / 1000, {}

    for _ in range(steps):
        assert engine.train_batch(batch(), small, micro_batching=CUT).is_applied
    return [p.detach().clone() for p in engine.module.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "memory",
    [
        {"optimizer_offload": True},
        {"param_offload": True},
        {"param_offload": True, "optimizer_offload": True},
    ],
    ids=str,
)
def test_training_with_offload_is_bit_for_bit_training_without(memory, dtype):
    expected = weights_after_steps(built(dtype=dtype))
    for a, b in zip(weights_after_steps(built(dtype=dtype, **memory)), expected, strict=True):
        assert torch.equal(a, b)


def test_the_state_is_elsewhere_between_steps_and_comes_back_for_each():
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterOptimizer([("weight", weight)], ADAM, offload=True)
    homes, address = [], weight.data_ptr()
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step(max_norm=1.0)
        state = optimizer.optimizer.state[optimizer.masters["weight"]]
        homes.append([t.data_ptr() for t in (optimizer.masters["weight"], state["exp_avg"])])
    assert homes[1] == homes[2], "the same CPU memory each time"
    assert weight.data_ptr() == address, "a rollout engine shares the weight"
    with optimizer.state_on_device():
        assert optimizer.masters["weight"].data_ptr() not in homes[0]


def test_an_offloaded_optimizer_is_saved_and_continues_bit_for_bit(tmp_path):
    straight, first, second = (built(optimizer_offload=True) for _ in range(3))
    expected = weights_after_steps(straight, steps=4)
    weights_after_steps(first, steps=2)
    save_state(tmp_path, "engine", first.state_dict())
    with torch.no_grad():
        for a, b in zip(second.module.parameters(), first.module.parameters(), strict=True):
            a.copy_(b)
    second.load_state_dict(load_state(tmp_path, "engine"))
    for a, b in zip(weights_after_steps(second, steps=2), expected, strict=True):
        assert torch.equal(a, b)


def test_frozen_weights_wait_in_memory_of_their_own_and_score_the_same():
    plain, offloaded = built(optimizer=None), built(optimizer=None, param_offload=True)
    homes = [p.data_ptr() for p in offloaded.module.parameters()]
    expected = plain.infer_batch(batch(), micro_batching=CUT)
    for _ in range(2):
        found = offloaded.infer_batch(batch(), micro_batching=CUT)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert [p.data_ptr() for p in offloaded.module.parameters()] == homes


def test_weights_written_while_they_wait_are_the_ones_used_next():
    layer = nn.Linear(2, 2, bias=False)
    offloaded = OffloadedWeights(layer.requires_grad_(False), torch.device("cpu"))
    with torch.no_grad():
        layer.weight.fill_(3)
    with offloaded.on_device():
        assert layer(torch.ones(2)).tolist() == [6, 6]
    assert layer.weight.tolist() == [[3, 3], [3, 3]]


def test_weights_come_back_to_their_place_when_a_pass_fails():
    layer = nn.Linear(2, 2)
    offloaded = OffloadedWeights(layer, torch.device("cpu"))
    home = layer.weight.data_ptr()
    with pytest.raises(RuntimeError, match="on purpose"), offloaded.on_device():
        raise RuntimeError("on purpose")
    assert layer.weight.data_ptr() == home


@pytest.mark.parametrize("bias", [True, False])
def test_joined_layers_leave_no_storage_behind_and_are_one_product_again(bias):
    layers = nn.ModuleList(nn.Linear(6, size, bias=bias) for size in (4, 2, 3))
    joined, x = JoinedLinears(list(layers)), torch.randn(5, 6)
    expected = joined.product(x).detach()  # a graph would keep the weights

    def storages():
        return {StorageWeakRef(p.untyped_storage()) for p in layers.parameters()}

    before = storages()
    offloaded = OffloadedWeights(layers, torch.device("cpu"))
    assert all(storage.expired() for storage in before)
    with offloaded.on_device():
        in_use = storages()
        assert len({storage.cdata for storage in in_use}) == 1 + bias, "each moved once"
        assert joined.is_whole
        assert torch.equal(joined.product(x), expected)
        with torch.no_grad():
            layers[1].weight.fill_(3)
    assert all(storage.expired() for storage in in_use)
    assert layers[1].weight.eq(3).all()
    assert joined.is_whole


def test_a_state_is_loaded_while_the_weights_are_on_the_device():
    """An fp32 weight is its own master, and moments go to the device of their master."""
    engine = built(param_offload=True)
    weights_after_steps(engine, steps=1)
    weight = dict(engine.module.named_parameters())["model.norm.weight"]
    home, places = weight.data_ptr(), []

    class Masters(dict):
        def __getitem__(self, name):
            places.append(weight.data_ptr())
            return super().__getitem__(name)

    state = copy.deepcopy(engine.state_dict())
    state["optimizer"]["masters"] = Masters(state["optimizer"]["masters"])
    engine.load_state_dict(state)
    assert places
    assert home not in places
    assert weight.data_ptr() == home


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_model_with_offloaded_weights_is_saved_and_continues_bit_for_bit(dtype, tmp_path):
    straight, first, second = (built(dtype=dtype, param_offload=True) for _ in range(3))
    expected = weights_after_steps(straight, steps=4)
    weights_after_steps(first, steps=2)
    save_state(tmp_path, "engine", first.state_dict())
    second.load_state_dict(load_state(tmp_path, "engine"))
    for a, b in zip(weights_after_steps(second, steps=2), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_offloaded_activations_give_the_same_gradient(checkpointing):
    expected = weights_after_steps(built(checkpointing=checkpointing))
    offloaded = built(checkpointing=checkpointing, activation_offload=True)
    offloaded._activations = OffloadedActivations(offloaded.module, min_elements=1)
    for a, b in zip(weights_after_steps(offloaded), expected, strict=True):
        assert torch.equal(a, b)


def test_large_activations_leave_the_device_and_weights_stay():
    layer = nn.Linear(SMALL_ACTIVATION, 2, bias=False)
    x = torch.ones(3, SMALL_ACTIVATION)
    with OffloadedActivations(layer).during_forward():
        y = layer(x.requires_grad_())
    x.data.zero_()  # what was kept is a copy
    layer.weight.data.fill_(7)  # what was kept is the weight itself
    y.sum().backward()
    assert layer.weight.grad.eq(3).all()
    assert x.grad.eq(14).all()
