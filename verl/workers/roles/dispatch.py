"""Dispatch of the rows of a batch to ranks by a plan, and collection of results in row order.

    driver                                              ranks
      lengths -> plan, rows reordered and split ---->     run the micro-batches of the plan
      results, back in the order of the rows    <----     columns, and the row of each entry

A dispatch mode of `register`, so every caller of a role's method gets it, the trainer as well as a
user's own loop; any number of rows will do. The role has the settings of the split
(`inference_settings`, `update_settings`), the driver plans for all ranks
(`verl.workers.schedule`). With one data-parallel rank the role makes its own plan.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.algos.components import COMPONENTS, component_tokens
from verl.algos.sessions import SESSION_INDEX, session_columns
from verl.data_plane.batch import ROW_COLUMN, StoredBatch, store_batch
from verl.data_plane.plane import DataPlane
from verl.protocol import DataProto, DataProtoFuture
from verl.protocol.transport import DEFAULT_TIMEOUT_SECONDS
from verl.single_controller.base.dispatch import (
    Arguments,
    collect_lazy_compute_data_proto,
    dispatch_nd_compute,
    dispatch_nd_compute_dataproto,
)
from verl.single_controller.base.worker_group import WorkerGroup
from verl.utils.media import MEDIA, media_of
from verl.workers.engine.inputs import (
    MEDIA_ROW,
    MEDIA_TABLE,
    PROMPT_INDEX,
    attach_media,
    first_appearance,
    prompt_groups,
)
from verl.workers.mini_batch import session_labels
from verl.workers.schedule import (
    MicroBatching,
    Passes,
    Placement,
    UpdatePlan,
    plan_inference,
    plan_update,
)

NUM_TOKENS, NUM_TRAINED = "num_tokens", "num_trained_tokens"
"""Columns of a stored batch that stand for its masks."""

PASSES, UPDATE_PLAN = "passes", "update_plan"
INFERENCE_COLUMNS = (
    "input_ids", "attention_mask", "position_ids", "responses", "response_mask", "uid", MEDIA,
)  # fmt: skip

ModeFunctions = dict[str, Callable[..., Any]]
AnyBatch = DataProto | DataProtoFuture | StoredBatch | TensorDict


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """How a role splits the rows of an update; counts are over all ranks."""

    rows_per_step: int
    micro_batching: MicroBatching
    epochs: int = 1
    shuffle_seed: int | None = None
    keeps_prompts_whole: bool = False
    """`rows_per_step` counts prompts, whose responses the loss compares."""


Question = Callable[[DataProto | StoredBatch], tuple[Any, ...]]
"""From a batch to what a role is asked about it, beside the name of its model."""


def nothing(batch: DataProto | StoredBatch) -> tuple[Any, ...]:
    """Settings that are the same for all batches."""
    return ()


def dispatch_inference(mesh_name: str, model: str, question: Question = nothing) -> ModeFunctions:
    """The mode of a method that runs rows through one of the role's models and returns columns.

    The role has `inference_settings(model, *question(batch))`.
    """
    return {
        "dispatch_fn": partial(split_for_inference, mesh_name, model, question),
        "collect_fn": partial(gather_rows, mesh_name),
    }


def dispatch_update(mesh_name: str, question: Question = nothing) -> ModeFunctions:
    """The mode of a method that trains on a batch.

    The role has `update_settings(*question(batch))`.
    """
    return {
        "dispatch_fn": partial(split_for_update, mesh_name, question),
        "collect_fn": partial(collect_lazy_compute_data_proto, mesh_name),
    }


def split_for_inference(
    mesh_name: str,
    model: str,
    question: Question,
    worker_group: WorkerGroup,
    data: AnyBatch,
) -> Arguments:
    dp_ranks, batch = worker_group.mesh_dp_ranks(mesh_name), as_batch(data)
    num_ranks = max(dp_ranks) + 1
    if num_ranks == 1:
        return dispatch_nd_compute_dataproto(dp_ranks, 1, worker_group, batch)
    batch = with_prompt_index(batch)
    plan = plan_inference(
        token_counts(batch, "attention_mask"),
        micro_batching=worker_group.execute_rank_zero_sync(
            "inference_settings", model, *question(batch)
        ),
        num_ranks=num_ranks,
        groups=prompts_to_keep_together(batch, len(batch), num_ranks),
    )
    parts = planned_chunks(batch, plan)
    for rank, part in enumerate(parts):
        part.meta_info[PASSES] = plan.passes[rank]
    return dispatch_nd_compute(dp_ranks, num_ranks, worker_group, parts)


def split_for_update(
    mesh_name: str, question: Question, worker_group: WorkerGroup, data: AnyBatch
) -> Arguments:
    dp_ranks, batch = worker_group.mesh_dp_ranks(mesh_name), as_batch(data)
    num_ranks = max(dp_ranks) + 1
    if num_ranks == 1:
        return dispatch_nd_compute_dataproto(dp_ranks, 1, worker_group, batch)
    batch = with_prompt_index(batch)
    settings: UpdateSettings = worker_group.execute_rank_zero_sync(
        "update_settings", *question(batch)
    )
    plan = plan_update(
        token_counts(batch, "attention_mask"),
        token_counts(batch, "response_mask"),
        rows_per_step=settings.rows_per_step,
        micro_batching=settings.micro_batching,
        num_ranks=num_ranks,
        epochs=settings.epochs,
        shuffle_seed=settings.shuffle_seed,
        groups=prompts_to_keep_together(
            batch,
            settings.rows_per_step,
            num_ranks,
            counts_prompts=settings.keeps_prompts_whole,
        ),
        sessions=session_labels(batch.batch),
        units=prompt_groups(batch.batch) if settings.keeps_prompts_whole else None,
        components=component_counts(batch),
    )
    parts = planned_chunks(batch, plan)
    for part in parts:
        part.meta_info[UPDATE_PLAN] = plan.to_dict()
    return dispatch_nd_compute(dp_ranks, num_ranks, worker_group, parts)


def with_prompt_index(batch: DataProto | StoredBatch) -> Any:
    """The tensors of a batch, with the number of each row's prompt: by `uid` where there is one,
    else by its tokens."""
    if isinstance(batch, StoredBatch):
        return batch.without_labels()
    rows = model_rows(batch).exclude(MEDIA_ROW, MEDIA_TABLE)
    rows[PROMPT_INDEX] = torch.tensor(prompt_groups(rows))
    arrays = {name: a for name, a in batch.non_tensor_batch.items() if name == MEDIA}
    return DataProto(batch=rows, non_tensor_batch=arrays, meta_info=batch.meta_info)


def model_rows(data: DataProto) -> TensorDict:
    """The tensors of a batch as an engine takes them: `uid` and what identifies the images of a
    row, if there are any, become columns; so do sessions of several rows. The images themselves
    (`media`) come along in a table."""
    uids, media = (data.non_tensor_batch.get(name) for name in ("uid", MEDIA))
    rows = data.batch.copy()
    if uids is not None and PROMPT_INDEX not in rows.keys():  # noqa: SIM118 (a TensorDict)
        rows[PROMPT_INDEX] = torch.tensor(first_appearance(uids))
    if SESSION_INDEX not in rows.keys():  # noqa: SIM118 (a TensorDict)
        rows.update(session_columns(data))
    if media is not None:
        attach_media(rows, [media_of(entry) for entry in media])
    return rows


def gather_rows(mesh_name: str, worker_group: WorkerGroup, output: list[Any]) -> Any:
    """The results in the order of the caller's rows, without those of padding."""
    batch = collect_lazy_compute_data_proto(mesh_name, worker_group, output)
    if isinstance(batch, DataProtoFuture):
        return replace(batch, dispatch_fn=in_row_order)
    return in_row_order(batch)


def in_row_order(batch: DataProto) -> DataProto:
    if ROW_COLUMN not in batch.batch.keys():  # noqa: SIM118 (a TensorDict)
        return batch
    rows: Tensor = batch.batch.pop(ROW_COLUMN)
    order = rows.argsort(stable=True)
    return batch.select_idxs(order[rows[order] >= 0])


def row_column(data: DataProto) -> dict[str, Tensor]:
    """What a method adds to the columns it returns; nothing if its rows were not planned."""
    is_planned = ROW_COLUMN in data.batch.keys()  # noqa: SIM118 (a TensorDict)
    return {ROW_COLUMN: data.batch[ROW_COLUMN]} if is_planned else {}


def planned_passes(data: DataProto) -> Passes | None:
    """The passes that this rank makes over its rows, if they were planned."""
    return data.meta_info.get(PASSES)


def update_plan(data: DataProto) -> UpdatePlan | None:
    """The plan that this rank's rows were dispatched by, if there is one."""
    is_planned = UPDATE_PLAN in data.meta_info
    return UpdatePlan.from_dict(data.meta_info[UPDATE_PLAN]) if is_planned else None


def planned_chunks(batch: Any, plan: Placement) -> list[Any]:
    """The chunk of each rank, its rows marked; -1 marks one that only fills a chunk up."""
    rows = torch.tensor(plan.order)
    chosen = batch.select_idxs(rows)
    rows[plan.padding] = -1
    chosen.batch[ROW_COLUMN] = rows
    parts = chosen.chunk(plan.num_ranks)
    for part in parts:
        part.meta_info = dict(batch.meta_info)
    return parts


def as_batch(data: AnyBatch) -> Any:
    if isinstance(data, TensorDict):
        return DataProto.from_tensordict(data)
    return data.get(DEFAULT_TIMEOUT_SECONDS) if isinstance(data, DataProtoFuture) else data


def prompts_to_keep_together(
    batch: DataProto | StoredBatch,
    rows_per_step: int,
    num_ranks: int,
    *,
    counts_prompts: bool = False,
) -> list[int] | None:
    """A label for the prompt of each row: a rank that has all of its responses runs it once.

    None where an optimizer step has fewer prompts than ranks, which would leave some without work.
    """
    labels = prompt_groups(batch.batch)
    counted = labels if counts_prompts else session_labels(batch.batch) or range(len(batch))
    num_steps = -(-len(set(counted)) // rows_per_step)
    return labels if len(set(labels)) >= num_ranks * num_steps else None


def token_counts(batch: DataProto | StoredBatch, mask: str) -> list[int]:
    if isinstance(batch, StoredBatch):
        return batch.batch[NUM_TOKENS if mask == "attention_mask" else NUM_TRAINED].tolist()
    return batch.batch[mask].sum(-1).tolist()


def component_counts(batch: DataProto | StoredBatch) -> dict[str, list[int]]:
    """Of each component of the loss that the batch has weights for, the tokens of each row."""
    if isinstance(batch, StoredBatch):
        known = batch.batch
        present = [name for name in COMPONENTS if f"num_{name}" in known.keys()]  # noqa: SIM118
        return {name: known[f"num_{name}"].tolist() for name in present}
    return {name: tokens.tolist() for name, tokens in component_tokens(batch.batch).items()}


def stored(plane: DataPlane, partition: str, batch: DataProto, num_parts: int) -> StoredBatch:
    """Put a batch into a plane. What dispatch reads of it stays here: a few numbers per row."""
    rows = model_rows(batch).exclude(MEDIA_ROW, MEDIA_TABLE)
    numbers = {name: rows[name] for name in rows.keys() if name not in batch.batch.keys()}  # noqa: SIM118
    if PROMPT_INDEX not in numbers:
        numbers[PROMPT_INDEX] = torch.tensor(prompt_groups(rows))
    numbers[NUM_TOKENS] = batch.batch["attention_mask"].sum(-1)
    numbers[NUM_TRAINED] = batch.batch["response_mask"].sum(-1)
    numbers |= {f"num_{name}": tokens for name, tokens in component_tokens(batch.batch).items()}
    known = DataProto(
        batch=TensorDict(numbers, batch_size=[len(batch)]),
        non_tensor_batch=dict(batch.non_tensor_batch),
        meta_info=batch.meta_info,
    )
    return store_batch(plane, partition, batch, known, num_parts)
