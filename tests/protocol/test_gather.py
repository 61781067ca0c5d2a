"""Rows gathered from real processes over gloo."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.protocol.batches import numbered, numbers, rows_of
from tests.utils.threads import thread_names
from tests.utils.two_ranks import run_on_two_ranks
from verl.protocol import DataProto, all_gather_data_proto
from verl.utils.distributed import destroy_global_process_group


def gather_everything(rank: int) -> None:
    unequal_parts_are_joined_in_rank_order(rank)
    batches_without_tensors_are_joined(rank)
    jagged_columns_are_joined(rank)
    a_rank_that_cannot_send_stops_all_ranks(rank)
    dist.barrier()
    destroy_global_process_group()
    assert "pt_gloo_runloop" not in thread_names(), "something still holds the process group"


def unequal_parts_are_joined_in_rank_order(rank: int) -> None:
    data = numbered(5)[:2] if rank == 0 else numbered(5)[2:]
    data.meta_info = {"rank": rank, "local": object()}
    assert all_gather_data_proto(data, dist.group.WORLD) is None
    assert numbers(data) == [0, 1, 2, 3, 4]
    assert data.meta_info["rank"] == rank


def batches_without_tensors_are_joined(rank: int) -> None:
    data = DataProto.from_dict(non_tensors={"x": [rank, [rank]]})
    all_gather_data_proto(data, dist.group.WORLD)
    assert data.batch is None
    assert data.non_tensor_batch["x"].tolist() == [0, [0], 1, [1]]


def jagged_columns_are_joined(rank: int) -> None:
    rows = [torch.arange(rank + 1), torch.arange(2)]
    data = DataProto.from_dict({"x": torch.nested.as_nested_tensor(rows, layout=torch.jagged)})
    all_gather_data_proto(data, dist.group.WORLD)
    assert rows_of(data.batch["x"]) == [[0], [0, 1], [0, 1], [0, 1]]


def a_rank_that_cannot_send_stops_all_ranks(rank: int) -> None:
    data = DataProto.from_dict(non_tensors={"x": [object() if rank == 1 else 1]})
    reason = r"non_tensor_batch\['x'\]\[0\]" if rank == 1 else r"ranks \[1\] could not send"
    with pytest.raises(ValueError, match=reason):
        all_gather_data_proto(data, dist.group.WORLD)
    assert len(data) == 1


def test_every_rank_has_the_rows_of_all_ranks(tmp_path: Path):
    run_on_two_ranks(gather_everything, tmp_path)
