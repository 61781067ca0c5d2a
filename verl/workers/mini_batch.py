"""How a batch becomes optimizer steps, and how the reports of its pieces become one.

A batch is cut into mini-batches, one optimizer step each; an engine cuts a mini-batch into
micro-batches. Counts that losses divide by are taken over the mini-batch, before it is cut.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.algos.aggregate import GlobalBatch
from verl.utils.metric import Metric


def mini_batches(
    data: TensorDict, rows_per_step: int, *, epochs: int, shuffle_seed: int | None = None
) -> Iterator[TensorDict]:
    """The rows of each optimizer step; every epoch goes over all rows once.

    The last mini-batch of an epoch may be short: a filter upstream may have dropped rows, and
    dropping more to make the numbers even would bias what is learnt.
    """
    generator = None if shuffle_seed is None else torch.Generator().manual_seed(shuffle_seed)
    for _ in range(epochs):
        order = torch.arange(len(data))
        if generator is not None:
            order = torch.randperm(len(data), generator=generator)
        for rows in order.split(rows_per_step):
            yield data[rows]


def global_counts(response_mask: Tensor, loss_scale_factor: float | None) -> GlobalBatch:
    """What `agg_loss` divides by, for a mini-batch whose mask is (B, T)."""
    return {
        "dp_size": 1,
        "batch_num_tokens": int(response_mask.sum()),
        "global_batch_size": int(response_mask.any(-1).sum()),
        "loss_scale_factor": loss_scale_factor or response_mask.shape[-1],
    }


def merge_reports(
    reports: Sequence[Mapping[str, float]], weights: Sequence[float]
) -> dict[str, Metric]:
    """Means over micro-batches, each weighted by how many response tokens it had."""
    merged: dict[str, Metric] = defaultdict(lambda: Metric("mean"))
    for report, weight in zip(reports, weights, strict=True):
        for name, value in report.items():
            merged[name].append(value, weight)
    return dict(merged)
