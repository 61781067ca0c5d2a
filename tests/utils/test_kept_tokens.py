import torch

from verl.utils.kept_tokens import kept_tokens


def test_each_row_keeps_what_its_mask_marks_wherever_that_is():
    ids = torch.tensor([[7, 8, 9], [1, 2, 3], [4, 5, 6]])
    mask = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 1]])
    assert [row.tolist() for row in kept_tokens(ids, mask)] == [[8, 9], [], [4, 6]]


def test_no_rows_are_no_lists():
    assert kept_tokens(torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, 3)) == []
