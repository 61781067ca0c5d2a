"""Tensors that travel together arrive as they were."""

import torch

from verl.workers.rollout.native.rows import Record, in_one_copy

CPU = torch.device("cpu")


def test_tensors_of_all_kinds_and_shapes_arrive_as_they_were():
    tensors = [
        torch.tensor([True, False, True]),
        torch.tensor([2**40, -1]),
        torch.zeros(0, 4, dtype=torch.long),
        torch.tensor([[1.5], [2.5], [3.5]], dtype=torch.float64),
        torch.tensor(7, dtype=torch.int32),
    ]
    for ours, theirs in zip(in_one_copy(tensors, CPU), tensors, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours, theirs)


def test_fields_of_a_record_share_its_buffer_and_do_not_overlap():
    record = Record([(torch.bool, torch.Size([3])), (torch.long, torch.Size([2]))])
    assert record.num_bytes == 16 + 16
    buffer = torch.zeros(record.num_bytes, dtype=torch.uint8)
    flags, numbers = record.views(buffer)
    flags.fill_(True)
    numbers.fill_(-1)
    assert buffer.tolist() == [1] * 3 + [0] * 13 + [255] * 16
