"""Packed attention through the kernel: outputs and gradients are those of the plain layouts."""

from dataclasses import replace

import pytest
import torch

from tests.models.kernels.devices import INTERPRETED
from verl.models.attention import AttentionOptions
from verl.models.shared_prompts import SharedPrompts

WHOLE = [70, 1, 90, 33]
SHARED = SharedPrompts(prompts=[70, 3], owners=[0, 0, 0, 1], samples=[5, 90, 0, 64])
NUM_PADDING = 6

on_each_device = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, marks=INTERPRETED),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)


def numbers(*shape, device, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


@on_each_device
@pytest.mark.parametrize("option", ["plain", "window", "softcap", "sinks"])
@pytest.mark.parametrize("parts", [WHOLE, SHARED], ids=["whole", "shared"])
def test_outputs_and_gradients_are_those_of_plain_torch(device, dtype, option, parts):
    sinks = numbers(6, device=device, dtype=dtype, seed=7) if option == "sinks" else None
    options = AttentionOptions(
        scaling=0.25,
        sliding_window=20 if option == "window" else None,
        softcap=3.0 if option == "softcap" else None,
        sinks=sinks,
    )
    check_against_plain_torch(device, dtype, parts, (6, 2, 16), options)


# A tile of queries holds whole tokens: here 64, 1 and 4 of them, in 64, 128 and 32 rows.
@on_each_device
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "parts"),
    [
        (1, 1, 16, [200, 64]),
        (70, 1, 16, [3, 70]),
        (7, 1, 80, SharedPrompts(prompts=[130], owners=[0], samples=[67])),
    ],
)
def test_gradients_hold_for_any_number_of_query_heads(device, dtype, heads, kv_heads, dim, parts):
    options = AttentionOptions(scaling=dim**-0.5)
    check_against_plain_torch(device, dtype, parts, (heads, kv_heads, dim), options)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=INTERPRETED)])
def test_megatron_takes_it_where_kernels_run(device):
    from verl.models.kernel_layout import KernelLayout
    from verl.workers.engine.megatron import load_library

    load_library()
    from verl.workers.engine.megatron.forward import packed_layout

    layout = packed_layout(WHOLE, torch.device(device))
    assert isinstance(layout, KernelLayout)
    assert layout.num_tokens == sum(WHOLE)


def check_against_plain_torch(device, dtype, parts, shape, options):
    from verl.models.kernel_layout import KernelLayout

    heads, kv_heads, dim = shape
    layout = KernelLayout(parts, torch.device(device))
    count = layout.num_tokens + NUM_PADDING
    shapes = (count, heads, dim), (count, kv_heads, dim), (count, kv_heads, dim)
    values = [
        numbers(*shape, device=device, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)
    ]
    pull = numbers(layout.num_tokens, heads, dim, device=device, dtype=dtype, seed=8)

    def outputs_and_gradients(attend, dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in values]
        sinks = options.sinks
        own_sinks = None if sinks is None else sinks.to(dtype, copy=True).requires_grad_()
        output = attend(0, *leaves, replace(options, sinks=own_sinks))
        real = output[: layout.num_tokens]
        inputs = leaves if own_sinks is None else [*leaves, own_sinks]
        grads = torch.autograd.grad((real.float() * pull.float()).sum(), inputs)
        return [real, output[layout.num_tokens :], *grads]

    def plain(layer, query, key, value, options):
        real = (x[: layout.num_tokens] for x in (query, key, value))
        output = layout.reference().attend(layer, *real, options)
        return torch.cat([output, output.new_zeros(NUM_PADDING, heads, dim)])

    found = outputs_and_gradients(layout.attend, dtype)
    expected = outputs_and_gradients(plain, torch.float32)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        scale = theirs.abs().max().clamp_min(1.0)
        assert (ours.float() - theirs).abs().max() <= tolerance * scale
