"""What the optimizer steps of an update need beyond their rows: counts, selections, reports.

Losses are divided by counts over all rows of a step, wherever they are, and some losses look at all
of them before the first pass (`whole_step_columns`). What passes and ranks report is joined here
too: sums and weights are added over ranks, so that a metric is the one a single rank would report.
"""

import math
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from verl.algos.aggregate import GlobalBatch
from verl.algos.components import component_tokens
from verl.algos.sessions import SESSION_INDEX
from verl.utils.distributed import Group, all_reduce_, collective_device
from verl.utils.metric import AggregationType, Metric
from verl.utils.metric.declared import combination_of
from verl.workers.engine.base import BaseEngine, TrainResult
from verl.workers.engine.inputs import prompt_groups
from verl.workers.schedule import MicroBatching, StepPlan, UpdatePlan, plan_update

NUM_TOKENS = "num_tokens"
"""The entry of a report that weighs its other entries: the response tokens of its rows."""

SIGNS = {AggregationType.MAX: 1.0, AggregationType.MIN: -1.0}


def plan_for_one_rank(
    data: TensorDict,
    engine: BaseEngine,
    *,
    rows_per_step: int,
    epochs: int,
    shuffle_seed: int | None,
    micro_batching: MicroBatching,
    keeps_prompts_whole: bool = False,
) -> UpdatePlan:
    """The plan of a rank that is alone; several need one that was made for all of them.

    With `keeps_prompts_whole` a step has `rows_per_step` prompts, with all of their rows.
    """
    if engine.get_data_parallel_size() > 1:
        raise ValueError(
            f"this rank is one of {engine.get_data_parallel_size()} and cannot know the rows of "
            'the others; put a plan for all ranks into meta_info["update_plan"] '
            "(verl.workers.schedule.plan_update)"
        )
    prompts = prompt_groups(data)
    return plan_update(
        data["attention_mask"].sum(-1).tolist(),
        data["response_mask"].sum(-1).tolist(),
        rows_per_step=rows_per_step,
        epochs=epochs,
        shuffle_seed=shuffle_seed,
        micro_batching=micro_batching,
        groups=prompts,
        sessions=session_labels(data),
        units=prompts if keeps_prompts_whole else None,
        components={name: tokens.tolist() for name, tokens in component_tokens(data).items()},
    )


def session_labels(data: TensorDict) -> list[int] | None:
    """The number of each row's session; None where every row is one."""
    has_sessions = SESSION_INDEX in data.keys()  # noqa: SIM118 (a TensorDict)
    return data[SESSION_INDEX].tolist() if has_sessions else None


def global_counts(
    step: StepPlan, num_columns: int, loss_scale_factor: float | None = None
) -> GlobalBatch:
    """What `agg_loss` divides by in a step whose response mask has `num_columns` columns.

    `dp_size` is 1: gradients of ranks are summed, so nothing turns an average back into a sum.
    """
    return {
        "dp_size": 1,
        "batch_num_tokens": step.batch_num_tokens,
        "global_batch_size": step.global_batch_size,
        "loss_scale_factor": loss_scale_factor or num_columns,
    }


def whole_step_columns(
    data: TensorDict, names: Sequence[str], step: StepPlan, engine: BaseEngine
) -> dict[str, Tensor]:
    """Columns of a step's rows on all ranks: this rank's own first, then those of the others."""
    rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    own = data.select(*names)[step.rows_of(rank)]
    if size == 1:
        return {name: own[name] for name in names}
    group = engine.get_data_parallel_group()
    counts = [len(step.rows_of(other)) for other in range(size)]
    columns = {}
    for name in names:
        column = own[name].to(collective_device(group))
        padded = column.new_zeros(max(counts), *column.shape[1:])
        padded[: counts[rank]] = column
        parts = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded, group=group)
        others = [parts[r][: counts[r]] for r in range(size) if r != rank]
        columns[name] = torch.cat([column, *others]).to(own[name].device)
    return columns


def merge_reports(reports: Sequence[Mapping[str, Any]], group: Group = None) -> dict[str, Metric]:
    """One part per metric for a step, from the reports of its passes on all ranks of `group`.

    Where the metric is declared as a sum, as losses are, every report holds its share of it; of a
    declared maximum or minimum the extreme is kept. Everything else is a mean over response tokens.
    Values may be tensors; they are read from the device all at once.
    """
    names = sorted({name for report in reports for name in report} - {NUM_TOKENS})
    kinds = {name: combination_of(name) for name in names}
    sums: dict[str, list[float]] = defaultdict(list)
    weights: dict[str, list[float]] = defaultdict(list)
    extremes = dict.fromkeys(names, -math.inf)  # minima are negated
    for report in as_floats(reports):
        for name in report.keys() - {NUM_TOKENS}:
            weight = 1.0 if kinds[name] is AggregationType.SUM else report[NUM_TOKENS]
            if not weight:  # a mean over no tokens, NaN perhaps, means nothing
                continue
            if kinds[name] in SIGNS:
                extremes[name] = larger(extremes[name], SIGNS[kinds[name]] * report[name])
            else:
                sums[name].append(report[name] * weight)
            weights[name].append(weight)
    table = torch.tensor(
        [[exact_sum(sums[name]), exact_sum(weights[name])] for name in names], dtype=torch.float64
    )
    largest = torch.tensor(list(extremes.values()), dtype=torch.float64)
    if group is not None:
        agree_on_names(names, group)
        all_reduce_(table, group=group)
        if any(kind in SIGNS for kind in kinds.values()):
            all_reduce_(largest, dist.ReduceOp.MAX, group)
    merged: dict[str, Metric] = {}
    for name, (total, weight), extreme in zip(names, table.tolist(), largest.tolist(), strict=True):
        kind = kinds[name]
        merged[name] = Metric(kind if kind in SIGNS else AggregationType.MEAN)
        if kind is AggregationType.SUM:
            merged[name].append(total)
        elif weight:
            value = SIGNS[kind] * extreme if kind in SIGNS else total / weight
            merged[name].append(value, weight)
    return merged


def summarise(
    results: Sequence[tuple[TrainResult, Mapping[str, Metric]]], role: str
) -> dict[str, Any]:
    """The metrics of an update from those of its optimizer steps.

    Losses are means over steps, declared extremes are those of all steps, everything else is a mean
    over response tokens.
    """
    names = sorted({name for _, report in results for name in report})
    norms = [result.grad_norm for result, _ in results]
    last = results[-1][0]
    scale = {} if last.loss_scale is None else {f"{role}/loss_scale": last.loss_scale}
    return {
        **{
            name: Metric.merge([r[name] for _, r in results if name in r]).aggregate()
            for name in names
        },
        f"{role}/grad_norm": sum(norms) / len(norms),
        f"{role}/lr": last.learning_rate,
        f"{role}/num_optimizer_steps": sum(result.is_applied for result, _ in results),
        f"{role}/num_skipped_steps": sum(not result.is_applied for result, _ in results),
        f"{role}/num_oom_splits": sum(result.num_oom_splits for result, _ in results),
        **scale,
    }


def agree_on_names(names: Sequence[str], group: Group) -> None:
    """Tables of different metrics must not be added up; all ranks must have reported the same."""
    digest = float(zlib.crc32("\n".join(names).encode()))
    largest = all_reduce_(
        torch.tensor([digest, -digest], dtype=torch.float64), dist.ReduceOp.MAX, group
    )
    if largest.tolist() != [digest, -digest]:
        raise ValueError(
            f"ranks reported different metrics; here they are {', '.join(names)}. A policy loss "
            "must report the same names for every micro-batch, one without response tokens included"
        )


def as_floats(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """The same reports as plain numbers, with one read from the device."""
    tensors = [
        value.detach().double()
        for report in reports
        for value in report.values()
        if isinstance(value, Tensor)
    ]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())
    return [
        {
            name: next(numbers) if isinstance(value, Tensor) else float(value)
            for name, value in report.items()
        }
        for report in reports
    ]


def larger(a: float, b: float) -> float:
    """max() ignores a NaN or returns it depending on its place; here it is returned."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def exact_sum(values: Sequence[float]) -> float:
    # fsum refuses inf - inf, where the honest answer is NaN.
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
