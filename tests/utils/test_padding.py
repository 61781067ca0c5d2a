import pytest
import torch

from verl.utils.torch_functional import (
    clip_by_value,
    expand_as_nested,
    get_response_mask,
    pad_2d_list_to_length,
    pad_sequence_to_length,
    postprocess_data,
    remove_pad_token,
    tokenize_and_postprocess_data,
)

IDS = torch.tensor([[1, 2, 3, 4, 5]])
MASK = torch.tensor([[0, 1, 1, 1, 1]])


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
    ids, mask = postprocess_data(IDS, MASK, max_length, 0, truncation=truncation)
    assert ids.tolist() == [kept]
    assert mask.tolist() == [[0 if token == 1 else 1 for token in kept]]


def test_short_rows_are_padded_with_their_mask():
    ids, mask = postprocess_data(IDS, MASK, 7, pad_token_id=9)
    assert ids.tolist() == [[9, 9, 1, 2, 3, 4, 5]]
    assert mask.tolist() == [[0, 0, 0, 1, 1, 1, 1]]
    ids, mask = postprocess_data(IDS, MASK, 6, pad_token_id=9, left_pad=False)
    assert ids.tolist() == [[1, 2, 3, 4, 5, 9]]
    assert mask.tolist() == [[0, 1, 1, 1, 1, 0]]


def test_too_long_a_row_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="5 tokens is longer than max_length 4"):
        postprocess_data(IDS, MASK, 4, 0)
    with pytest.raises(ValueError, match="one of: error, left, right, middle"):
        postprocess_data(IDS, MASK, 9, 0, truncation="top")
    with pytest.raises(ValueError, match="one shape"):
        postprocess_data(IDS, MASK[0], 9, 0)


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
    assert remove_pad_token(IDS, MASK) == [[2, 3, 4, 5]]


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
