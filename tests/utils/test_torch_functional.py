import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.utils import torch_functional
from verl.utils.torch_functional import (
    calculate_sum_pi_squared_from_logits,
    clip_by_value,
    entropy_from_logits,
    entropy_from_logits_with_chunking,
    expand_as_nested,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_response_mask,
    get_wsd_schedule_with_warmup,
    kept_tokens,
    log_probs_from_logits_all_rmpad,
    log_probs_from_logits_response,
    log_probs_from_logits_response_rmpad,
    logprobs_from_logits,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    pad_2d_list_to_length,
    pad_sequence_to_length,
    postprocess_data,
    remove_pad_token,
    tokenize_and_postprocess_data,
)

VALUES = torch.tensor([[1.0, 2.0, 99.0], [6.0, float("nan"), 3.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])  # keeps 1, 2, 6, 3


def test_only_kept_values_are_summed_and_averaged():
    assert masked_sum(VALUES, MASK) == 12
    assert masked_mean(VALUES, MASK) == 3
    assert masked_sum(VALUES, MASK, axis=-1).tolist() == [3, 9]
    assert masked_mean(VALUES, MASK, axis=-1).tolist() == [1.5, 4.5]
    assert masked_mean(VALUES, MASK.bool(), axis=0).tolist() == [3.5, 2, 3]


def test_an_empty_mask_has_mean_zero():
    assert masked_mean(VALUES, torch.zeros_like(MASK)) == 0


def test_variance_divides_by_one_less_than_the_count():
    # deviations from 3: -2, -1, 3, 0; squares sum to 14
    assert masked_var(VALUES, MASK).item() == pytest.approx(14 / 3)
    assert masked_var(VALUES, MASK, unbiased=False).item() == pytest.approx(14 / 4)


@pytest.mark.parametrize("num_kept", [0, 1])
def test_fewer_than_two_values_have_no_variance(num_kept):
    mask = torch.zeros(3)
    mask[:num_kept] = 1
    assert masked_var(torch.tensor([5.0, 1.0, 2.0]), mask) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_single_value_whitens_to_zero(dtype):
    values, mask = torch.tensor([5.0, 1.0], dtype=dtype), torch.tensor([1, 0], dtype=dtype)
    assert masked_whiten(values, mask)[0] == 0
    assert masked_whiten(values, mask, shift_mean=False)[0].item() == pytest.approx(5.0)


def test_whitening_by_hand():
    values, mask = torch.tensor([1.0, 3.0, 100.0]), torch.tensor([1, 1, 0])
    half = 1 / 2**0.5  # mean 2, variance 2
    assert masked_whiten(values, mask)[:2].tolist() == pytest.approx([-half, half])
    kept = masked_whiten(values, mask, shift_mean=False)[:2]
    assert kept.tolist() == pytest.approx([2 - half, 2 + half])


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=20), st.integers(0, 5))
def test_whitening_matches_torch_on_the_kept_values(kept, num_masked):
    values = torch.tensor(kept + [float("inf")] * num_masked)
    mask = torch.tensor([1.0] * len(kept) + [0.0] * num_masked)
    plain = torch.tensor(kept)
    expected = (plain - plain.mean()) * torch.rsqrt(plain.var() + 1e-8)
    torch.testing.assert_close(
        masked_whiten(values, mask)[: len(kept)], expected, rtol=1e-3, atol=1e-2
    )


def test_a_nan_outside_the_mask_does_not_reach_the_gradient():
    values = VALUES.clone().requires_grad_()
    masked_mean(values, MASK).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[0.25, 0.25, 0.0], [0.25, 0.0, 0.25]]


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
    monkeypatch.setattr(torch_functional, "_CHUNK_ELEMENTS", chunk_elements)
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


IDS = torch.tensor([[1, 2, 3, 4, 5]])
PADDING_MASK = torch.tensor([[0, 1, 1, 1, 1]])


def test_the_end_token_is_part_of_the_response_and_what_follows_is_not():
    response = torch.tensor([[20, 10, 34, 1, 0, 0], [78, 0, 76, 2, 1, 0], [23, 98, 1, 0, 0, 0]])
    assert get_response_mask(response, eos_token=1).tolist() == [
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 0],
    ]
    assert get_response_mask(response, eos_token=[1, 2]).tolist()[1] == [1, 1, 1, 1, 0, 0]


def test_an_end_token_that_also_pads_ends_the_response_once():
    response = torch.tensor([[5, 2, 2, 2], [5, 6, 7, 8]])
    mask = get_response_mask(response, eos_token=2, dtype=torch.bool)
    assert mask.tolist() == [[True, True, False, False], [True, True, True, True]]


def test_lists_are_padded_to_the_longest_or_to_the_given_length():
    assert pad_2d_list_to_length([[1], [2, 3]], 0).tolist() == [[1, 0], [2, 3]]
    assert pad_2d_list_to_length([[1], [2, 3]], 9, max_length=3).tolist() == [[1, 9, 9], [2, 3, 9]]
    assert pad_2d_list_to_length([[1], [2, 3]], 9, max_length=1).tolist() == [[1, 9], [2, 3]]


def test_tensors_are_padded_on_either_side():
    assert pad_sequence_to_length(IDS, 7, 0).tolist() == [[1, 2, 3, 4, 5, 0, 0]]
    assert pad_sequence_to_length(IDS, 7, 0, left_pad=True).tolist() == [[0, 0, 1, 2, 3, 4, 5]]
    assert pad_sequence_to_length(IDS, 4, 0) is IDS


@pytest.mark.parametrize(
    ("truncation", "max_length", "kept"),
    [
        ("left", 3, [3, 4, 5]),
        ("right", 3, [1, 2, 3]),
        ("middle", 3, [1, 4, 5]),
        ("middle", 4, [1, 2, 4, 5]),
        ("error", 5, [1, 2, 3, 4, 5]),
    ],
)
def test_truncation_names_the_part_that_is_lost(truncation, max_length, kept):
    ids, mask = postprocess_data(IDS, PADDING_MASK, max_length, 0, truncation=truncation)
    assert ids.tolist() == [kept]
    assert mask.tolist() == [[0 if token == 1 else 1 for token in kept]]


def test_short_rows_are_padded_with_their_mask():
    ids, mask = postprocess_data(IDS, PADDING_MASK, 7, pad_token_id=9)
    assert ids.tolist() == [[9, 9, 1, 2, 3, 4, 5]]
    assert mask.tolist() == [[0, 0, 0, 1, 1, 1, 1]]
    ids, mask = postprocess_data(IDS, PADDING_MASK, 6, pad_token_id=9, left_pad=False)
    assert ids.tolist() == [[1, 2, 3, 4, 5, 9]]
    assert mask.tolist() == [[0, 1, 1, 1, 1, 0]]


def test_too_long_a_row_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="5 tokens is longer than max_length 4"):
        postprocess_data(IDS, PADDING_MASK, 4, 0)
    with pytest.raises(ValueError, match="one of: error, left, right, middle"):
        postprocess_data(IDS, PADDING_MASK, 9, 0, truncation="top")
    with pytest.raises(ValueError, match="one shape"):
        postprocess_data(IDS, PADDING_MASK[0], 9, 0)


def test_text_is_tokenized_without_adding_special_tokens():
    def tokenizer(text: str, return_tensors: str, add_special_tokens: bool) -> dict:
        assert return_tensors == "pt"
        assert not add_special_tokens
        ids = torch.tensor([[ord(letter) for letter in text]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    ids, mask = tokenize_and_postprocess_data("ab", tokenizer, max_length=3, pad_token_id=0)
    assert ids.tolist() == [[0, 97, 98]]
    assert mask.tolist() == [[0, 1, 1]]


def test_padding_is_removed():
    assert remove_pad_token(IDS, PADDING_MASK) == [[2, 3, 4, 5]]


def test_a_value_per_sequence_becomes_a_value_per_token():
    jagged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    expanded = expand_as_nested(torch.tensor([1.0, 2.0]), jagged)
    assert [row.tolist() for row in expanded.unbind()] == [[1, 1], [2, 2, 2]]
    with pytest.raises(ValueError, match="3 values cannot be spread over 2 sequences"):
        expand_as_nested(torch.zeros(3), jagged)
    with pytest.raises(ValueError, match=r"torch\.jagged"):
        expand_as_nested(torch.zeros(2), torch.zeros(2, 2))


def test_limits_may_differ_by_element():
    low, high = torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0])
    assert clip_by_value(torch.tensor([5.0, 1.0]), low, high).tolist() == [1, 2]


def test_each_row_keeps_what_its_mask_marks_wherever_that_is():
    ids = torch.tensor([[7, 8, 9], [1, 2, 3], [4, 5, 6]])
    mask = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 1]])
    assert [row.tolist() for row in kept_tokens(ids, mask)] == [[8, 9], [], [4, 6]]


def test_no_rows_are_no_lists():
    assert kept_tokens(torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, 3)) == []


def rates(make, *args, num_steps: int, **kwargs) -> list[float]:
    """The learning rate of each step, for a full rate of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make(optimizer, *args, **kwargs)
    seen = []
    for _ in range(num_steps):
        seen.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return seen


def test_constant_after_a_linear_warm_up():
    assert rates(get_constant_schedule_with_warmup, 2, num_steps=4) == [0, 0.5, 1, 1]
    assert rates(get_constant_schedule_with_warmup, 0, num_steps=2) == [1, 1]


def test_cosine_by_hand():
    seen = rates(get_cosine_schedule_with_warmup, 2, 6, num_steps=9, min_lr_ratio=0.2)
    quarter = 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2
    three_quarters = 0.2 + 0.8 * (1 + math.cos(3 * math.pi / 4)) / 2
    expected = [0, 0.5, 1, quarter, 0.6, three_quarters, 0.2, 0.2, 0.2]
    assert seen == pytest.approx(expected)


def test_cosine_warms_up_from_the_initial_ratio():
    seen = rates(get_cosine_schedule_with_warmup, 2, 4, num_steps=3, init_lr_ratio=0.5)
    assert seen == pytest.approx([0.5, 0.75, 1])


def test_a_whole_cosine_cycle_comes_back_up():
    seen = rates(get_cosine_schedule_with_warmup, 0, 4, num_steps=5, num_cycles=1.0)
    assert seen == pytest.approx([1, 0.5, 0, 0.5, 1])


def test_linear_reaches_the_minimum_at_the_last_step():
    seen = rates(get_linear_schedule_with_warmup, 1, 5, num_steps=7, min_lr_ratio=0.2)
    assert seen == pytest.approx([0, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_warmup_stable_decay():
    seen = rates(get_wsd_schedule_with_warmup, 1, 5, num_steps=7, stable_ratio=0.5)
    assert seen == pytest.approx([0, 1, 1, 1, 0.5, 0, 0])


def test_a_resumed_schedule_continues_on_the_same_curve():
    straight = rates(get_cosine_schedule_with_warmup, 2, 10, num_steps=10)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    first = get_cosine_schedule_with_warmup(optimizer, 2, 10)
    for _ in range(5):
        optimizer.step()
        first.step()
    second = get_cosine_schedule_with_warmup(optimizer, 2, 10)
    second.load_state_dict(first.state_dict())
    seen = []
    for _ in range(5):
        seen.append(second.get_last_lr()[0])
        optimizer.step()
        second.step()
    assert seen == straight[5:]


@pytest.mark.parametrize("name", ["min_lr_ratio", "init_lr_ratio"])
def test_a_ratio_lies_between_zero_and_one(name):
    with pytest.raises(ValueError, match=f"{name} is 1.5"):
        rates(get_cosine_schedule_with_warmup, 1, 5, num_steps=1, **{name: 1.5})
    with pytest.raises(ValueError, match="stable_ratio is 2"):
        rates(get_wsd_schedule_with_warmup, 1, 5, num_steps=1, stable_ratio=2)
