"""Log-probabilities and entropy: the kernels against plain torch, alone and inside the head."""

import math

import pytest
import torch

from tests.models.kernels.devices import on_each_device, on_each_dtype, random
from verl.models.head import OutputHead, scores, token_log_probs

PLAIN = {"temperature": 1.0, "scale": 1.0, "softcap": None}
SHAPED = {"temperature": 0.7, "scale": 1.3, "softcap": 4.0}
VOCABULARIES = [11, 4096, 9001]
"""Less than a block, some whole ones, and some with a part of another."""


def plain_log_probs(logits, targets, *, temperature, scale, softcap):
    head = OutputHead(logits, softcap=softcap, scale=scale)
    log_p = scores(logits, head, temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def wide_logits(num_rows, vocabulary, dtype, device):
    return (3 * random(num_rows, vocabulary, device=device)).detach().to(dtype)


def some_targets(num_rows, vocabulary, device):
    """The first and the last token, and some between."""
    return torch.linspace(0, vocabulary - 1, num_rows).round().long().to(device)


@on_each_device
@on_each_dtype
@pytest.mark.parametrize("options", [PLAIN, SHAPED])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_log_prob_entropy_and_their_gradient_equal_plain_torch(device, dtype, options, vocabulary):
    from verl.models.kernels.log_probs import logits_gradient_, logits_log_probs

    logits = wide_logits(3, vocabulary, dtype, device)
    targets = some_targets(3, vocabulary, device)
    log_prob, log_sum, mean = logits_log_probs(logits, targets, **options)

    leaf = logits.clone().requires_grad_()
    plain_log_prob, plain_entropy = plain_log_probs(leaf, targets, **options)
    torch.testing.assert_close(log_prob, plain_log_prob, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(log_sum - mean, plain_entropy, rtol=1e-5, atol=2e-5)

    on_log_prob, on_entropy = random(2, 3, device=device, seed=4).detach()
    (plain_log_prob * on_log_prob + plain_entropy * on_entropy).sum().backward()
    grad = logits_gradient_(logits, targets, log_sum, mean, on_log_prob, on_entropy, **options)
    assert grad.data_ptr() == logits.data_ptr()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(grad, leaf.grad, rtol=tolerance, atol=tolerance * 1e-2)


@on_each_device
def test_three_equal_logits_have_log_prob_minus_log_three(device):
    from verl.models.kernels.log_probs import logits_gradient_, logits_log_probs

    logits = torch.full((1, 3), 5.0, device=device)
    targets = torch.tensor([1], device=device)
    log_prob, log_sum, mean = logits_log_probs(logits, targets, **PLAIN)
    assert log_prob.item() == pytest.approx(-math.log(3))
    assert (log_sum - mean).item() == pytest.approx(math.log(3))
    one, zero = torch.ones(1, device=device), torch.zeros(1, device=device)
    grad = logits_gradient_(logits, targets, log_sum, mean, one, zero, **PLAIN)
    assert grad[0].tolist() == pytest.approx([-1 / 3, 2 / 3, -1 / 3])


@on_each_device
def test_a_rows_log_prob_has_the_same_bits_alone_and_beside_others(device):
    from verl.models.kernels.log_probs import logits_log_probs

    logits = wide_logits(6, 9001, torch.bfloat16, device)
    targets = some_targets(6, 9001, device)
    together = logits_log_probs(logits, targets, **SHAPED)
    for row in range(6):
        part = slice(row, row + 1)
        alone = logits_log_probs(logits[part].clone(), targets[part], **SHAPED)
        for ours, theirs in zip(together, alone, strict=True):
            assert torch.equal(ours[part], theirs)


@on_each_device
def test_logits_in_the_thousands_and_a_masked_token_stay_finite(device):
    from verl.models.kernels.log_probs import logits_gradient_, logits_log_probs

    logits = torch.tensor([[3e4, 3e4, -3e4, -math.inf]], device=device)
    targets = torch.tensor([0], device=device)
    log_prob, log_sum, mean = logits_log_probs(logits, targets, **PLAIN)
    assert log_prob.item() == pytest.approx(-math.log(2), abs=2e-3)
    one = torch.ones(1, device=device)
    grad = logits_gradient_(logits, targets, log_sum, mean, one, 0 * one, **PLAIN)
    assert grad[0].tolist() == pytest.approx([0.5, -0.5, 0.0, 0.0], abs=2e-3)


@on_each_device
@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -1e30, -torch.inf])
def test_a_block_of_masked_tokens_adds_nothing(device, lowest):
    from verl.models.kernels.log_probs import BLOCK, logits_log_probs

    logits = torch.full((1, 2 * BLOCK), lowest, device=device)
    logits[0, :4] = 1.0
    target = torch.zeros(1, dtype=torch.long, device=device)
    log_prob, log_sum, mean = logits_log_probs(logits, target, **PLAIN)
    assert log_prob.item() == pytest.approx(-math.log(4), rel=1e-6)
    assert (log_sum - mean).item() == pytest.approx(math.log(4), rel=1e-6)


@on_each_device
def test_nan_logits_and_targets_outside_the_vocabulary_give_nan(device):
    from verl.models.kernels.log_probs import logits_gradient_, logits_log_probs

    logits = torch.zeros(3, 5, device=device)
    logits[0, 2] = math.nan
    targets = torch.tensor([0, 5, -100], device=device)
    log_prob, log_sum, mean = logits_log_probs(logits, targets, **PLAIN)
    assert log_prob.isnan().all()
    assert log_sum.isnan().tolist() == [True, False, False]
    one = torch.ones(3, device=device)
    grad = logits_gradient_(logits, targets, log_sum, mean, one, one, **PLAIN)
    assert grad[0].isnan().all()


@on_each_device
def test_block_statistics_are_those_of_each_blocks_scores(device):
    from verl.models.kernels.log_probs import BLOCK, block_statistics

    logits = wide_logits(2, BLOCK + 5, torch.float32, device)
    temperatures = torch.tensor([0.5, 2.0], device=device)
    moments = torch.empty(2, 2, device=device)
    maxima, denominators = block_statistics(
        logits, temperatures, scale=1.0, softcap=None, moments=moments
    )
    for index, block in enumerate([slice(0, BLOCK), slice(BLOCK, None)]):
        z = logits[:, block] / temperatures[:, None]
        top = z.amax(-1)
        weight = (z - top[:, None]).exp()
        assert torch.equal(maxima[:, index], top)
        torch.testing.assert_close(denominators[:, index], weight.sum(-1))
        torch.testing.assert_close(moments[:, index], (weight * z).sum(-1), rtol=1e-5, atol=1e-3)


@on_each_device
def test_tops_and_totals_have_the_same_bits_with_moments_and_without(device):
    from verl.models.kernels.log_probs import BLOCK, block_statistics

    logits = wide_logits(3, 3 * BLOCK - 7, torch.bfloat16, device)
    logits[1, : BLOCK + 9] = -math.inf  # a block of nothing, and one with a hole
    temperatures = torch.tensor([1.0, 0.7, 1.3], device=device)
    moments = torch.empty(3, 3, device=device)
    settings = {"scale": 1.0, "softcap": None}
    bare = block_statistics(logits, temperatures, **settings)
    whole = block_statistics(logits, temperatures, **settings, moments=moments)
    for ours, theirs in zip(bare, whole, strict=True):
        assert torch.equal(ours, theirs)
    assert moments.isfinite().all()
    assert moments[1, 0] == bare[1][1, 0] == 0


@on_each_device
def test_logits_whose_rows_are_not_contiguous_are_refused(device):
    from verl.models.kernels.log_probs import logits_log_probs

    with pytest.raises(ValueError, match="each row must be contiguous"):
        logits_log_probs(torch.zeros(4, 3, device=device).t(), torch.zeros(3).long(), **PLAIN)


@on_each_device
@on_each_dtype
@pytest.mark.parametrize(
    ("is_exact", "num_kept_rows"), [(False, 0), (True, 0), (False, 33)], ids=str
)
def test_the_head_on_kernels_equals_plain_torch_with_gradients(
    device, dtype, is_exact, num_kept_rows, monkeypatch
):
    monkeypatch.setattr("verl.models.head.WORKSPACE_ELEMENTS", 4 * 103)  # sixteen rows a chunk
    kept = num_kept_rows * 103 * dtype.itemsize
    monkeypatch.setattr("verl.models.head.kept_bytes", lambda device: kept)
    hidden = random(37, 8, dtype=dtype, device=device)
    weight = random(103, 8, dtype=dtype, device=device, seed=1)
    bias = random(103, dtype=dtype, device=device, seed=2)
    targets = some_targets(37, 103, device)
    head = OutputHead(weight, bias, softcap=6.0, scale=0.8, is_exact=is_exact)
    on_log_prob, on_entropy = random(2, 37, device=device, seed=4).detach()

    def loss_and_gradients(log_prob, entropy):
        loss = (log_prob * on_log_prob + entropy * on_entropy).sum()
        return log_prob, entropy, *torch.autograd.grad(loss, [hidden, weight, bias])

    logits = torch.nn.functional.linear(hidden, weight, bias)
    plain = plain_log_probs(logits, targets, temperature=1.3, scale=0.8, softcap=6.0)
    ours = loss_and_gradients(*token_log_probs(hidden, head, targets, temperature=1.3))
    for actual, expected in zip(ours, loss_and_gradients(*plain), strict=True):
        assert actual.dtype == expected.dtype
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        difference = (actual.float() - expected.float()).abs().max()
        assert difference <= tolerance * expected.float().abs().max()
