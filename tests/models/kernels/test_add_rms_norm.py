"""A sum and its norm in one kernel: plain torch's numbers, and the bits of sum and norm apart."""

import pytest
import torch

from tests.models.kernels.devices import (
    assert_close,
    assert_same_results_and_gradients,
    on_each_device,
    on_each_dtype,
    random,
)

EPS = 1e-5


def tensors(*shape, dtype=torch.float32, device="cpu"):
    """Residual, delta and weight."""
    residual = random(*shape, dtype=dtype, device=device)
    delta = random(*shape, dtype=dtype, device=device, seed=1)
    return residual, delta, random(shape[-1], dtype=dtype, device=device, seed=2)


@on_each_device
@on_each_dtype
@pytest.mark.parametrize("is_offset", [False, True])
@pytest.mark.parametrize("shape", [(7, 33), (2, 5, 16), (1, 5000), (600, 8)])
def test_sum_and_norm_equal_plain_torch_with_gradients(device, dtype, is_offset, shape):
    from verl.models.kernels.rms_norm import add_rms_norm, reference_add_rms_norm

    given = tensors(*shape, dtype=dtype, device=device)
    assert_same_results_and_gradients(
        add_rms_norm(*given, EPS, is_offset=is_offset),
        reference_add_rms_norm(*given, EPS, is_offset=is_offset),
        given,
    )


def assert_bits_of_sum_and_norm(residual, delta, weight, *, is_offset):
    from verl.models.kernels.rms_norm import add_rms_norm, rms_norm

    total, normed = add_rms_norm(residual, delta, weight, EPS, is_offset=is_offset)
    expected = residual + delta
    assert torch.equal(total, expected)
    assert torch.equal(normed, rms_norm(expected, weight, EPS, is_offset=is_offset))


# bf16 is left to GPUs: Triton's interpreter cuts it off where torch rounds it.
@on_each_device
@pytest.mark.parametrize("is_offset", [False, True])
@pytest.mark.parametrize("width", [8, 33, 896])
def test_in_fp32_the_bits_are_those_of_sum_and_norm_apart(device, is_offset, width):
    assert_bits_of_sum_and_norm(*tensors(9, width, device=device), is_offset=is_offset)


@pytest.mark.gpu
@pytest.mark.parametrize("is_offset", [False, True])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [64, 100, 896, 1536, 2048, 3584, 8192])
@pytest.mark.parametrize("num_rows", [1, 7, 1024])
def test_in_bf16_the_bits_are_those_of_sum_and_norm_apart(num_rows, width, weight_dtype, is_offset):
    residual, delta, weight = tensors(num_rows, width, dtype=torch.bfloat16, device="cuda")
    weight = weight.detach().to(weight_dtype)
    # Of different size, so that much of delta is rounded away.
    assert_bits_of_sum_and_norm(30 * residual, delta, weight, is_offset=is_offset)


@on_each_device
@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_is_not_used_has_no_part_in_the_gradient(device, used):
    from verl.models.kernels.rms_norm import add_rms_norm, reference_add_rms_norm

    given = tensors(5, 24, device=device)
    pull = random(5, 24, device=device, seed=3).detach()
    found, expected = (
        torch.autograd.grad((f(*given, EPS)[used] * pull).sum(), given, allow_unused=True)
        for f in (add_rms_norm, reference_add_rms_norm)
    )
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        assert_close(ours, theirs)
    if used == 0:
        assert found[2] is None
        assert torch.equal(found[0], pull)
    else:
        assert_close(found[2], expected[2])


@on_each_device
def test_only_what_collects_gradients_gets_one(device):
    from verl.models.kernels.rms_norm import add_rms_norm, reference_add_rms_norm

    residual, delta, weight = tensors(5, 24, device=device)
    given = residual.detach(), delta, weight.detach()
    assert_same_results_and_gradients(
        add_rms_norm(*given, EPS), reference_add_rms_norm(*given, EPS), [delta]
    )


@on_each_device
def test_each_of_many_tiles_adds_its_own_gradient(device, monkeypatch):
    from verl.models.kernels import rms_norm as kernels

    monkeypatch.setattr(kernels, "MAX_PARTIAL_SUMS", 3)
    given = tensors(23, 2000, device=device)  # two rows a tile: twelve tiles, four a program
    assert_same_results_and_gradients(
        kernels.add_rms_norm(*given, EPS), kernels.reference_add_rms_norm(*given, EPS), given
    )


@on_each_device
def test_tensors_with_gaps_and_without_rows_are_taken(device):
    from verl.models.kernels.rms_norm import add_rms_norm, reference_add_rms_norm

    residual, delta, weight = tensors(6, 24, device=device)
    given = residual[:, ::2], delta.view(12, 12)[::2], weight[::2]
    assert_same_results_and_gradients(
        add_rms_norm(*given, EPS), reference_add_rms_norm(*given, EPS), [residual, delta, weight]
    )
    total, normed = add_rms_norm(residual[:0], delta[:0], weight, EPS)
    assert total.shape == normed.shape == (0, 24)
    (total + normed).sum().backward()
    assert weight.grad.tolist() == [0.0] * 24


@on_each_device
@pytest.mark.parametrize(
    ("delta", "notice"),
    [
        (torch.zeros(1, 8), r"residual is torch.float32 \(3, 8\) .* \(1, 8\); they must be alike"),
        (torch.zeros(3, 8, dtype=torch.bfloat16), "delta is torch.bfloat16"),
    ],
)
def test_summands_that_differ_in_kind_are_refused(device, delta, notice):
    from verl.models.kernels.rms_norm import add_rms_norm

    with pytest.raises(ValueError, match=notice):
        add_rms_norm(torch.zeros(3, 8, device=device), delta.to(device), torch.ones(8), EPS)
