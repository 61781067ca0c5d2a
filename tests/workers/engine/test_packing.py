import pytest
import torch

from verl.workers.engine.inputs import pack_rows

# [pad pad 5 6 | 7 8 0], [0 9 10 11 | 12 0 0], [pad pad pad 3 | - - -]
IDS = torch.tensor([[0, 0, 5, 6, 7, 8, 0], [0, 9, 10, 11, 12, 0, 0], [0, 0, 0, 3, 0, 0, 0]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0, 0]])
POSITIONS = (MASK.cumsum(1) - 1).clamp_min(0)


def test_rows_are_laid_end_to_end_without_their_padding():
    rows = pack_rows(IDS, MASK, POSITIONS, num_response_columns=3)
    assert rows.input_ids.tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 3]
    assert rows.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert rows.parts == [4, 4, 1]


def test_a_response_token_is_predicted_by_the_token_before_it():
    rows = pack_rows(IDS, MASK, POSITIONS, num_response_columns=3)
    assert rows.targets.tolist() == [7, 8, 12]
    assert rows.input_ids[rows.sources].tolist() == [6, 7, 11]


def test_values_return_to_their_places_and_nowhere_else():
    rows = pack_rows(IDS, MASK, POSITIONS, num_response_columns=3)
    unpacked = rows.unpack(torch.tensor([0.1, 0.2, 0.3]))
    expected = torch.tensor([[0.1, 0.2, 0.0], [0.3, 0.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(unpacked, expected)


def test_a_response_without_a_prompt_is_refused_with_its_row():
    with pytest.raises(ValueError, match="row 1 has a response but no prompt"):
        pack_rows(
            IDS[:2], torch.tensor([[0, 0, 1, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 0]]), POSITIONS[:2], 3
        )
