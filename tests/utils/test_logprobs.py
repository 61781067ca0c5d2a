import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.utils import logprobs
from verl.utils.torch_functional import (
    calculate_sum_pi_squared_from_logits,
    entropy_from_logits,
    entropy_from_logits_with_chunking,
    log_probs_from_logits_all_rmpad,
    log_probs_from_logits_response,
    log_probs_from_logits_response_rmpad,
    logprobs_from_logits,
)

VOCABULARY = 11


def random_logits(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, VOCABULARY) * 3).to(dtype)


def copy_model(input_ids: torch.Tensor) -> torch.Tensor:
    """Logits of a model that knows the next token: log-probs of a right answer are 0."""
    following = input_ids.roll(-1, dims=-1)
    return torch.nn.functional.one_hot(following, VOCABULARY).float() * 1000


def test_a_log_probability_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)]])
    assert logprobs_from_logits(logits, torch.tensor([1])).item() == pytest.approx(math.log(0.75))
    assert logprobs_from_logits(logits, torch.tensor([0])).item() == pytest.approx(math.log(0.25))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_elements", [1, 3 * VOCABULARY, 2**25])
def test_values_and_gradients_match_log_softmax(dtype, chunk_elements, monkeypatch):
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", chunk_elements)
    logits = random_logits(2, 5, dtype=dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (2, 5))
    weights = torch.randn(2, 5)

    result = logprobs_from_logits(logits, labels)
    (gradient,) = torch.autograd.grad((result * weights).sum(), logits)

    plain = logits.detach().float().requires_grad_()
    expected = plain.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), plain)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, expected_gradient.to(dtype), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("inplace", [True, False])
def test_overwriting_the_logits_does_not_change_the_gradient(inplace):
    hidden = torch.randn(6, 4)
    weight = torch.randn(4, VOCABULARY, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (6,))
    logits = hidden @ weight
    before = logits.detach().clone()
    logprobs_from_logits(logits, labels, inplace_backward=inplace).sum().backward()
    expected = hidden.T @ (torch.nn.functional.one_hot(labels, VOCABULARY) - before.softmax(-1))
    torch.testing.assert_close(weight.grad, expected)
    assert torch.equal(logits, before) is not inplace


def test_logits_that_somebody_else_needs_are_not_overwritten_silently():
    logits = random_logits(4).requires_grad_() * 1
    entropy = entropy_from_logits(logits)  # older, so its backward runs after the overwriting one
    score = logprobs_from_logits(logits, torch.zeros(4, dtype=torch.long), inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (entropy + score).sum().backward()


def test_leaf_logits_survive():
    logits = random_logits(4).requires_grad_()
    before = logits.detach().clone()
    logprobs_from_logits(logits, torch.zeros(4, dtype=torch.long)).sum().backward()
    assert torch.equal(logits, before)


def test_logits_longer_than_the_tokens_are_refused():
    ids = torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(ValueError, match=r"\(2, 7, 11\) and tokens \(2, 5\) do not line up"):
        logprobs_from_logits(random_logits(2, 7), ids)
    with pytest.raises(ValueError, match="do not line up"):
        log_probs_from_logits_response(ids, random_logits(2, 7), response_length=3)
    with pytest.raises(ValueError, match="do not line up"):
        log_probs_from_logits_response_rmpad(
            ids, torch.ones_like(ids), random_logits(11), response_length=3
        )


@pytest.mark.parametrize("response_length", [0, 5, 6])
def test_a_response_that_leaves_no_prompt_is_refused(response_length):
    ids = torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(ValueError, match=f"response_length is {response_length}"):
        log_probs_from_logits_response(ids, random_logits(2, 5), response_length)


@given(st.floats(0.2, 5.0), st.integers(0, 2**31))
def test_temperature_scales_differences_of_log_probabilities(temperature, seed):
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    rows = (logits / temperature).expand(VOCABULARY, VOCABULARY)
    scores = logprobs_from_logits(rows, torch.arange(VOCABULARY))
    differences = scores[:, None] - scores[None, :]
    expected = (logits[:, None] - logits[None, :]) / temperature
    torch.testing.assert_close(differences, expected, rtol=1e-3, atol=1e-3)


def test_entropy_by_hand_and_of_impossible_tokens():
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf], [5.0, 5.0, 5.0, 5.0]])
    assert entropy_from_logits(logits).tolist() == pytest.approx([math.log(2), math.log(4)])
    logits.requires_grad_()
    entropy_from_logits(logits).sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_size", [1, 3, 2048])
def test_entropy_does_not_depend_on_chunks(dtype, chunk_size):
    logits = random_logits(2, 5, dtype=dtype).requires_grad_()
    entropy = entropy_from_logits_with_chunking(logits, chunk_size)
    (gradient,) = torch.autograd.grad((entropy * torch.arange(10).view(2, 5)).sum(), logits)

    plain = logits.detach().float().requires_grad_()
    expected = torch.distributions.Categorical(logits=plain).entropy()
    (slope,) = torch.autograd.grad((expected * torch.arange(10).view(2, 5)).sum(), plain)
    assert entropy.dtype == torch.float32
    torch.testing.assert_close(entropy, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, entropy_from_logits(logits))
    torch.testing.assert_close(gradient, slope.to(dtype), rtol=1e-2, atol=1e-5)


def test_a_chunk_holds_at_least_one_row():
    with pytest.raises(ValueError, match="chunk_size is 0"):
        entropy_from_logits_with_chunking(random_logits(2), chunk_size=0)


def test_the_sum_of_squared_probabilities_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)]])
    assert calculate_sum_pi_squared_from_logits(logits).item() == pytest.approx(0.0625 + 0.5625)


def test_each_token_is_scored_by_the_position_before_it():
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    scores = log_probs_from_logits_response(ids, copy_model(ids), response_length=3)
    assert scores.tolist() == [[0, 0, 0], [0, 0, 0]]
    wrong = ids.clone()
    wrong[1, 3] = 0  # the model expected 5 there
    scores = log_probs_from_logits_response(wrong, copy_model(ids), response_length=3)
    assert scores.tolist() == [[0, 0, 0], [0, -1000, 0]]


def test_packed_and_padded_scores_agree():
    ids = torch.tensor([[0, 3, 1, 4, 1], [9, 2, 6, 0, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    logits = random_logits(2, 5)
    padded = log_probs_from_logits_response(ids, logits, response_length=3) * mask[:, -3:]
    packed = logits[mask.bool()]
    from_padded_ids = log_probs_from_logits_response_rmpad(ids, mask, packed, response_length=3)
    torch.testing.assert_close(from_padded_ids, padded)
    from_packed_ids = log_probs_from_logits_all_rmpad(
        ids[mask.bool()][None],
        packed[None],
        mask.flatten().nonzero().flatten(),
        batch_size=2,
        seqlen=5,
        response_length=3,
    )
    torch.testing.assert_close(from_packed_ids, padded)


def test_a_mask_of_another_shape_is_refused():
    ids = torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(ValueError, match="must have one shape"):
        log_probs_from_logits_response_rmpad(ids, torch.ones(2, 4), random_logits(8), 2)
