"""Rows of a tensor, of which some may be asked for several times."""

from torch import Tensor

from verl.models.kernels.availability import can_run_triton


def picked_rows(rows: Tensor, places: Tensor) -> Tensor:
    """`rows[places]`. The gradients of a row that was picked several times are added in a fixed
    order, so that the same passes give the same bits; with torch's `index_select` they are added on
    a GPU in the order in which they happen to come."""
    if not rows.is_cuda:
        return rows.index_select(0, places)
    if rows.dim() == 2 and can_run_triton(rows.device):
        from verl.models.kernels.embedding import embedding  # noqa: PLC0415 - needs triton

        return embedding(places, rows)
    return rows[places]
