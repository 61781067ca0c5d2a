"""Normalisation, rotary embedding and gate: the kernel against plain torch."""

import pytest
import torch

from tests.models.kernels.devices import (
    assert_close,
    assert_same_results_and_gradients,
    on_each_device,
    on_each_dtype,
    random,
)


@on_each_device
@on_each_dtype
@pytest.mark.parametrize("is_offset", [False, True])
@pytest.mark.parametrize("shape", [(7, 33), (2, 5, 3, 16), (1, 5000), (1200, 8)])
def test_rms_norm_equals_plain_torch_with_gradients(device, dtype, is_offset, shape):
    from verl.models.kernels.rms_norm import reference_rms_norm, rms_norm

    x = random(*shape, dtype=dtype, device=device)
    weight = random(shape[-1], dtype=dtype, device=device, seed=1)
    assert_same_results_and_gradients(
        rms_norm(x, weight, 1e-5, is_offset=is_offset),
        reference_rms_norm(x, weight, 1e-5, is_offset=is_offset),
        [x, weight],
    )


@on_each_device
def test_the_weights_gradient_is_whole_when_a_program_takes_many_tiles(device, monkeypatch):
    from verl.models.kernels import rms_norm as kernels

    monkeypatch.setattr(kernels, "MAX_PARTIAL_SUMS", 3)
    x = random(23, 2000, device=device)  # two rows a tile: twelve tiles, four a program
    weight = random(2000, device=device, seed=1)
    assert_same_results_and_gradients(
        kernels.rms_norm(x, weight, 1e-6), kernels.reference_rms_norm(x, weight, 1e-6), [x, weight]
    )


@on_each_device
def test_a_weight_in_fp32_makes_a_bf16_norm_fp32_as_in_torch(device):
    from verl.models.kernels.rms_norm import reference_rms_norm, rms_norm

    x = random(3, 9, dtype=torch.bfloat16, device=device)
    weight = random(9, device=device, seed=1)
    actual, expected = (f(x, weight, 1e-6) for f in (rms_norm, reference_rms_norm))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


@on_each_device
@on_each_dtype
@pytest.mark.parametrize(("heads", "kv_heads", "tokens", "head_dim"), [(3, 1, 5, 6), (4, 2, 1, 16)])
def test_rotary_equals_plain_torch_with_gradients(device, dtype, heads, kv_heads, tokens, head_dim):
    from verl.models.kernels.embedding import apply_rotary, reference_rotary

    q = random(1, tokens, heads, head_dim, dtype=dtype, device=device)
    k = random(1, tokens, kv_heads, head_dim, dtype=dtype, device=device, seed=1)
    cos, sin = random(2, 1, tokens, head_dim, dtype=dtype, device=device, seed=2).detach()
    heads_first = q.transpose(1, 2), k.transpose(1, 2)
    assert_same_results_and_gradients(
        apply_rotary(*heads_first, cos, sin), reference_rotary(*heads_first, cos, sin), [q, k]
    )


@on_each_device
def test_rotary_in_fp32_has_the_bits_of_the_plain_formula(device):
    from verl.models.kernels.embedding import apply_rotary, reference_rotary

    q = random(1, 4, 9, 10, device=device).detach()
    cos, sin = random(2, 1, 9, 10, device=device, seed=2).detach()
    for ours, theirs in zip(
        apply_rotary(q, q[:, :2], cos, sin), reference_rotary(q, q[:, :2], cos, sin), strict=True
    ):
        assert torch.equal(ours, theirs)


@on_each_device
def test_rotating_a_part_of_the_head_is_refused(device):
    from verl.models.kernels.embedding import apply_rotary

    q = random(1, 2, 3, 8, device=device)
    table = torch.ones(1, 3, 4, device=device)
    with pytest.raises(ValueError, match=r"cos \(1, 3, 4\).* must be \(1, tokens, head_dim\)"):
        apply_rotary(q, q, table, table)


@on_each_device
@on_each_dtype
@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 401)])
def test_the_gate_equals_plain_torch_with_gradients(device, dtype, is_gelu, shape):
    from verl.models.kernels.swiglu import gated, reference_gated

    gate = (4 * random(*shape, device=device)).detach().to(dtype).requires_grad_()
    up = random(*shape, dtype=dtype, device=device, seed=1)
    assert_same_results_and_gradients(
        gated(gate, up, is_gelu=is_gelu), reference_gated(gate, up, is_gelu=is_gelu), [gate, up]
    )


@on_each_device
def test_a_large_gate_neither_overflows_nor_turns_into_nan(device):
    from verl.models.kernels.swiglu import gated, reference_gated

    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], device=device, requires_grad=True)
    up = torch.ones_like(gate, requires_grad=True)
    for is_gelu in (False, True):
        assert_same_results_and_gradients(
            gated(gate, up, is_gelu=is_gelu), reference_gated(gate, up, is_gelu=is_gelu), [gate, up]
        )


@on_each_device
def test_a_rows_numbers_do_not_depend_on_the_other_rows(device):
    from verl.models.kernels.embedding import apply_rotary
    from verl.models.kernels.rms_norm import rms_norm
    from verl.models.kernels.swiglu import gated

    dtype = torch.bfloat16
    x, up = random(2, 37, 96, dtype=dtype, device=device)
    weight = random(96, dtype=dtype, device=device, seed=1)
    q = x.reshape(1, 37, 4, 24).transpose(1, 2)
    cos, sin = random(2, 1, 37, 24, dtype=dtype, device=device, seed=2).detach()
    some = slice(11, 24)
    assert torch.equal(rms_norm(x, weight, 1e-6)[some], rms_norm(x[some], weight, 1e-6))
    assert torch.equal(gated(x, up)[some], gated(x[some], up[some]))
    rotated, _ = apply_rotary(q, q[:, :2], cos, sin)
    alone, _ = apply_rotary(q[:, :, some], q[:, :2, some], cos[:, some], sin[:, some])
    assert torch.equal(rotated[:, :, some], alone)


@on_each_device
def test_a_rows_gradients_do_not_depend_on_the_other_rows(device):
    from verl.models.kernels.rms_norm import rms_norm

    x = random(37, 96, device=device)
    weight = random(96, device=device, seed=1)
    pull = random(37, 96, device=device, seed=2).detach()
    (together,) = torch.autograd.grad((rms_norm(x, weight, 1e-6) * pull).sum(), x)
    (alone,) = torch.autograd.grad((rms_norm(x[20:21], weight, 1e-6) * pull[20:21]).sum(), x)
    assert torch.equal(together[20], alone[20])


@on_each_device
def test_no_tokens_give_no_tokens(device):
    from verl.models.kernels.embedding import apply_rotary
    from verl.models.kernels.rms_norm import rms_norm
    from verl.models.kernels.swiglu import gated

    x = random(0, 8, device=device)
    weight = random(8, device=device)
    (rms_norm(x, weight, 1e-6) * gated(x, x)).sum().backward()
    assert weight.grad.tolist() == [0.0] * 8
    q = random(1, 2, 0, 8, device=device)
    table = torch.ones(1, 0, 8, device=device)
    assert apply_rotary(q, q, table, table)[0].shape == q.shape


@on_each_device
@pytest.mark.parametrize("padding_id", [None, 3])
def test_equal_tokens_add_up_in_the_gradient_of_the_embedding(device, padding_id):
    from verl.models.kernels.embedding import embedding

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 7, (2, 90), generator=generator).to(device)  # 7 and 8 never occur
    table, pull = random(9, 700, device=device), random(2, 90, 700, device=device, seed=1).detach()
    expected = torch.nn.functional.embedding(ids, table, padding_id)
    found = embedding(ids, table, padding_id=padding_id)
    assert torch.equal(found, expected)
    (wanted,) = torch.autograd.grad((expected * pull).sum(), table)
    (actual,) = torch.autograd.grad((found * pull).sum(), table)
    assert_close(actual, wanted)
    assert (actual[7:] == 0).all()


@on_each_device
@on_each_dtype
@pytest.mark.parametrize("is_gelu", [False, True])
def test_the_gate_and_the_layer_behind_it_equal_plain_torch_with_gradients(device, dtype, is_gelu):
    from verl.models.kernels.swiglu import gated_down, reference_gated

    both = random(2, 5, 74, dtype=dtype, device=device)
    weight = random(11, 37, dtype=dtype, device=device, seed=1)
    pull = random(2, 5, 11, dtype=dtype, device=device, seed=2).detach()
    plain = torch.nn.functional.linear(reference_gated(*both.chunk(2, -1), is_gelu=is_gelu), weight)
    found = gated_down(both, weight, is_gelu=is_gelu)
    assert_close(found, plain)
    for actual, expected in zip(
        torch.autograd.grad((found * pull).sum(), [both, weight]),
        torch.autograd.grad((plain * pull).sum(), [both, weight]),
        strict=True,
    ):
        assert_close(actual, expected)
