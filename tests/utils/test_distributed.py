"""What two ranks compute together: one pair of processes does it all, each test reads a part."""

import math
import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from tests.utils.sockets import LOOPBACK, listening_sockets, new_addresses
from tests.utils.threads import thread_names
from tests.utils.two_ranks import run_on_two_ranks
from verl.utils.distributed import destroy_global_process_group, store_at_master
from verl.utils.seqlen_balancing import rearrange_micro_batches
from verl.utils.torch_functional import (
    allgather_dict_tensors,
    broadcast_dict_tensor,
    distributed_masked_mean,
    distributed_mean_max_min_std,
    split_dict_tensor_into_batches,
)

# From Python 3.12 on, forking a process with threads warns; the ranks use one thread.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

LENGTHS = ([4, 4, 4, 4], [1, 1, 1, 1])


def batch_of(lengths: list[int]) -> TensorDict:
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    return TensorDict({"attention_mask": mask.long()}, batch_size=len(lengths))


def micro_batch_counts(rank: int, **options) -> int:
    return len(rearrange_micro_batches(batch_of(LENGTHS[rank]), 8, **options)[0])


def refusal(lengths: list[int], **options) -> str:
    try:
        rearrange_micro_batches(batch_of(lengths), **options)
    except ValueError as error:
        return str(error)
    return "no refusal"


def test_the_store_of_rank_0_listens_on_the_master_address_only(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.delenv("DIST_INIT_METHOD", raising=False)
    for name, value in ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port), ("RANK", 0):
        monkeypatch.setenv(name, str(value))
    before = listening_sockets(os.getpid())
    store = store_at_master(timedelta(seconds=20))
    assert new_addresses(listening_sockets(os.getpid()), before) == {LOOPBACK}
    monkeypatch.setenv("RANK", "1")
    store_at_master(timedelta(seconds=20)).set("key", "from rank 1")
    assert store.get("key") == b"from rank 1"
    monkeypatch.setenv("MASTER_ADDR", "head-node")
    assert store_at_master(timedelta(seconds=20)) is None
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert store_at_master(timedelta(seconds=20)) is None


def work(rank: int) -> dict:
    values = torch.tensor([[1.0, 3.0], []][rank])  # rank 1 has none and must still take part
    one = torch.tensor([[5.0], []][rank])
    gathered = allgather_dict_tensors(
        TensorDict({"x": torch.full((2, 1), rank)}, batch_size=2), size=2, group=None
    )
    columns = {"b": torch.tensor([rank]), "a": torch.tensor([10 + rank])}
    if rank == 1:
        columns = dict(reversed(columns.items()))
    in_order = allgather_dict_tensors(columns, size=2, group=None)
    broadcast_dict_tensor(columns, src=1, group=None)
    return {
        "backend": dist.get_backend(),
        "stats": [part.item() for part in distributed_mean_max_min_std(values)],
        "mean only": distributed_mean_max_min_std(values, False, False, False)[1:],
        "single": [part.item() for part in distributed_mean_max_min_std(one)],
        "masked": distributed_masked_mean(
            torch.tensor([[1.0, math.nan], [2.0, 6.0]][rank]), torch.tensor([[1, 0], [1, 1]][rank])
        ).item(),
        "gathered": (gathered["x"].flatten().tolist(), list(gathered.batch_size)),
        "in order": {key: value.tolist() for key, value in in_order.items()},
        "broadcast": {key: value.tolist() for key, value in columns.items()},
        "same number": micro_batch_counts(rank, dp_group=dist.group.WORLD),
        "own number": micro_batch_counts(rank, same_micro_num_in_dp=False),
        "rounded number": micro_batch_counts(rank, num_batches_divided_by=4),
        "too long": refusal([[3], [9]][rank], max_token_len=7),
        "too few": refusal([[3], [7, 7]][rank], max_token_len=7),
    }


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_on_two_ranks(work, tmp_path_factory.mktemp("ranks"))


def test_ranks_on_a_cpu_meet_over_gloo(answers):
    assert [answer["backend"] for answer in answers] == ["gloo", "gloo"]


def test_statistics_are_those_of_all_values_even_if_a_rank_has_none(answers):
    for answer in answers:
        assert answer["stats"] == pytest.approx([2.0, 3.0, 1.0, math.sqrt(2)])
        assert answer["mean only"] == (None, None, None)


def test_a_single_value_over_all_ranks_has_no_spread(answers):
    for answer in answers:
        assert answer["single"] == [5.0, 5.0, 5.0, 0.0]


def test_a_masked_mean_divides_once_by_the_count_of_all_ranks(answers):
    assert [answer["masked"] for answer in answers] == pytest.approx([3.0, 3.0])


def test_rows_of_all_ranks_are_joined_in_rank_order(answers):
    for answer in answers:
        assert answer["gathered"] == ([0, 0, 1, 1], [4])
        assert answer["in order"] == {"a": [10, 11], "b": [0, 1]}


def test_a_broadcast_overwrites_with_the_source(answers):
    for answer in answers:
        assert answer["broadcast"] == {"a": [11], "b": [1]}


def test_ranks_use_equally_many_micro_batches(answers):
    assert [answer["same number"] for answer in answers] == [2, 2]
    assert [answer["own number"] for answer in answers] == [2, 1]
    assert [answer["rounded number"] for answer in answers] == [4, 4]


def test_what_one_rank_cannot_do_every_rank_refuses(answers):
    assert "a sequence of another rank has 9 tokens" in answers[0]["too long"]
    assert "sequence 0 has 9 tokens" in answers[1]["too long"]
    for answer in answers:
        assert "2 micro-batches are needed and a rank has only 1 sequences" in answer["too few"]


def leave_with_a_group_in_a_cycle(rank: int) -> tuple[list[str], list[str]]:
    cycle: list = [dist.group.WORLD]
    cycle.append(cycle)
    del cycle
    dist.barrier()
    before = thread_names()
    destroy_global_process_group()
    return before, thread_names()


def test_no_thread_of_the_group_is_left_at_the_end(tmp_path):
    for before, after in run_on_two_ranks(leave_with_a_group_in_a_cycle, tmp_path):
        assert "pt_gloo_runloop" in before or not before
        assert "pt_gloo_runloop" not in after


def test_one_process_needs_no_group():
    mean, largest, smallest, deviation = distributed_mean_max_min_std(torch.tensor([1, 2, 6]))
    assert (mean, largest, smallest) == (3, 6, 1)
    assert deviation is not None
    assert deviation.item() == pytest.approx(math.sqrt(14 / 2))
    assert distributed_masked_mean(torch.tensor([1.0, 9.0]), torch.tensor([1, 0])) == 1
    destroy_global_process_group()  # nothing to leave


def test_a_dictionary_splits_into_equal_batches():
    rows = TensorDict({"x": torch.arange(6)}, batch_size=6)
    parts = split_dict_tensor_into_batches(rows, 2)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="6 rows cannot be split into batches of 4"):
        split_dict_tensor_into_batches(rows, 4)
