"""Splitting over a mesh: ranks of one data-parallel group share a part of the batch.

A worker says for each mesh which data-parallel rank it has and whether its result counts
(`Worker._register_dispatch_collect_info`). The group asks once, remembers the answer, cuts a batch
into as many parts as there are data-parallel ranks and hands each part, transported once, to every
rank of its group. Of the results, those of the collecting ranks are joined in the order of the
parts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from verl.protocol import BatchError, DataProtoFuture
from verl.single_controller.base.dispatch import (
    Arguments,
    collect_batches,
    map_arguments,
    split_with_padding,
)
from verl.single_controller.base.modes import PADDING_KEY

if TYPE_CHECKING:
    from verl.single_controller.base.worker_group import WorkerGroup


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Callable[..., Any]]:
    """The dispatch mode for a method that works on the mesh called `mesh_name`."""
    return {
        "dispatch_fn": partial(dispatch_lazy_compute_data_proto, mesh_name),
        "collect_fn": partial(collect_lazy_compute_data_proto, mesh_name),
    }


def dispatch_lazy_compute_data_proto(
    mesh_name: str, worker_group: "WorkerGroup", *args: Any, **kwargs: Any
) -> Arguments:
    dp_ranks = worker_group.mesh_dp_ranks(mesh_name)
    dp_size = max(dp_ranks) + 1
    return dispatch_nd_compute_dataproto(dp_ranks, dp_size, worker_group, *args, **kwargs)


def collect_lazy_compute_data_proto(
    mesh_name: str, worker_group: "WorkerGroup", output: list[Any]
) -> Any:
    """Join the collecting ranks' results by data-parallel rank, so rows return in their order."""
    mask = worker_group.mesh_collect_mask(mesh_name)
    ranks = collect_nd_compute(mask, worker_group, list(range(len(output))))
    ranks.sort(key=worker_group.mesh_dp_ranks(mesh_name).__getitem__)
    return collect_batches(worker_group, output, ranks)


def dispatch_nd_compute_dataproto(
    dp_rank_mapping: Sequence[int],
    dp_size: int,
    worker_group: "WorkerGroup",
    *args: Any,
    **kwargs: Any,
) -> Arguments:
    parts, keyword_parts = split_with_padding(dp_size, args, kwargs)
    return dispatch_nd_compute(dp_rank_mapping, dp_size, worker_group, *parts, **keyword_parts)


def dispatch_nd_compute(
    dp_rank_mapping: Sequence[int],
    dp_size: int,
    worker_group: "WorkerGroup",
    *args: Any,
    **kwargs: Any,
) -> Arguments:
    """Of each argument, a list of `dp_size` parts, give part `dp_rank_mapping[rank]` to a rank."""
    if len(dp_rank_mapping) != worker_group.world_size:
        raise BatchError(
            f"the mesh names a data-parallel rank for {len(dp_rank_mapping)} workers, "
            f"but the group has {worker_group.world_size}"
        )
    padding = kwargs.pop(PADDING_KEY, 0)

    def place(parts: Any) -> list[Any]:
        if not isinstance(parts, (list, tuple)) or len(parts) != dp_size:
            raise BatchError(f"each argument must be a list of {dp_size} parts, got {parts!r:.80}")
        shared = list(parts)
        if not isinstance(shared[0], DataProtoFuture):  # a future is only a handle already
            shared = worker_group.put_once(shared)
        return [shared[dp_rank] for dp_rank in dp_rank_mapping]

    placed, keyword_placed = map_arguments(place, args, kwargs)
    if padding:
        keyword_placed[PADDING_KEY] = padding
    return placed, keyword_placed


def collect_nd_compute(
    collect_mask: Sequence[bool], worker_group: "WorkerGroup", output: list[Any]
) -> list[Any]:
    """The results of the ranks whose collect flag is true."""
    if len(collect_mask) != len(output):
        raise BatchError(f"{len(output)} results for a collect mask of {len(collect_mask)} ranks")
    return [result for result, counts in zip(output, collect_mask, strict=True) if counts]


def collect_nd_compute_dataproto(
    collect_mask: Sequence[bool], worker_group: "WorkerGroup", output: list[Any]
) -> Any:
    ranks = collect_nd_compute(collect_mask, worker_group, list(range(len(output))))
    return collect_batches(worker_group, output, ranks)
