"""The forward pass of a micro-batch: padded rows in, columns of their response tokens out.

Rows are packed without padding, prompts shared where the engine does so. With sequence parallelism
each rank computes its shard of the tokens. The output layer runs on response positions only.
"""

from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from verl.models.divergence import divergence_to, log_probs_at, top_log_probs
from verl.models.exact import is_exact
from verl.models.forward import hidden_states, packed_layout
from verl.models.head import OutputHead, gather_rows, sum_squared_probs, token_log_probs
from verl.models.loading import score_head
from verl.models.ulysses import SequenceShard, UlyssesLayout
from verl.models.vision import placed_features
from verl.utils.device import without_waiting
from verl.workers.engine.base import Columns
from verl.workers.engine.inputs import HOST_COLUMNS, MEDIA_ROW, MEDIA_TABLE, ModelInputs
from verl.workers.engine.outputs import Outputs, ToTeachers
from verl.workers.engine.routes import PassRoutes, RouteOptions


def forward_rows(
    module: PreTrainedModel,
    rows: TensorDict,
    *,
    device: torch.device,
    temperature: float,
    is_value_model: bool,
    prefix_sharing: bool,
    outputs: Outputs,
    sequence_group: dist.ProcessGroup | None,
    routes: RouteOptions | None = None,
) -> Columns:
    """`log_probs` and `entropy` of the response tokens, or `values`; (B, T), 0 where there is none.

    `outputs` asks for more columns; what must be computed before this pass is in it already.
    `sequence_group` has the ranks that split the tokens of these rows; `routes` says what a model
    with experts adds.
    """
    inputs = ModelInputs.of(rows, prefix_sharing=prefix_sharing).to(device)
    layout, shard = packed_layout(module, inputs.parts), None
    if sequence_group is not None:
        shard = SequenceShard(len(inputs.input_ids), inputs.sources, sequence_group)
    experts = None if routes is None else PassRoutes(routes.routing, rows, inputs, shard)
    if shard is not None:
        inputs, layout = inputs.shard(shard), UlyssesLayout(layout, shard)
    features = placed_features(module, inputs.media, one_by_one=is_exact(module))
    hidden = hidden_states(module, inputs.input_ids, inputs.position_ids, layout, features)
    sources = gather_rows(hidden, inputs.sources)
    if is_value_model:
        return {"values": inputs.unpack(score_head(module)(sources).squeeze(-1).float())}
    if outputs.states:
        return {"states": inputs.unpack(sources)}
    head = OutputHead.of(module)
    log_probs, entropy = token_log_probs(sources, head, inputs.targets, temperature=temperature)
    columns = {"log_probs": log_probs, "entropy": entropy}
    if outputs.sum_pi_squared:
        columns["sum_pi_squared"] = sum_squared_probs(sources, head, temperature=temperature)
    if outputs.top_k:
        columns["top_ids"], columns["top_log_probs"] = top_log_probs(
            sources, head, outputs.top_k, temperature=temperature
        )
    if outputs.log_probs_at is not None:
        ids = inputs.pick(without_waiting(rows[outputs.log_probs_at], device)).long()
        columns["log_probs_at"] = log_probs_at(sources, head, ids, temperature=temperature)
    if outputs.to_teachers is not None:
        columns["divergence"], columns["same_top"] = divergence_to_teachers(
            sources, head, inputs, outputs.to_teachers, temperature=temperature
        )
    columns = {name: inputs.unpack(values) for name, values in columns.items()}
    if experts is not None and routes is not None:
        columns |= experts.columns(routes, inputs.sources)
    return columns


def divergence_to_teachers(
    sources: Tensor,
    head: OutputHead,
    inputs: ModelInputs,
    request: ToTeachers,
    *,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """(R,) the divergence of each token to its row's teacher, and whether both have one favourite.

    The response tokens of this rank are looked up in the (b, T, hidden) states of every teacher.
    """
    num_columns = inputs.shape[1]
    row_of = inputs.own_index // num_columns
    total, is_same = sources.new_zeros((2, len(sources)), dtype=torch.float32)
    for teacher in request.given:
        is_own = without_waiting(teacher.is_own, sources.device)
        place = (is_own.cumsum(0) - 1) * num_columns  # of a row's first token in the states
        chosen = is_own[row_of].nonzero().squeeze(1)
        tokens = place[row_of[chosen]] + inputs.own_index[chosen] % num_columns
        value, same = divergence_to(
            sources[chosen],
            head,
            teacher.states.flatten(0, 1)[tokens],
            teacher.head,
            request.divergence,
            temperature=temperature,
        )
        total = total.index_copy(0, chosen, value)
        is_same = is_same.index_copy(0, chosen, same)
    return total, is_same


def rows_on_host(data: TensorDict) -> TensorDict:
    """The batch with the columns that packing reads in CPU memory.

    On a device every micro-batch would wait for the one before it, only to read its row lengths. A
    batch with a device of its own would move them back.
    """
    on_host: Any = {name: data[name].cpu() for name in HOST_COLUMNS if name in data.keys()}  # noqa: SIM118
    return data.copy().clear_device_().update(on_host)


def rows_on_device(rows: TensorDict, device: torch.device) -> TensorDict:
    """All columns on the device, without waiting for it."""
    columns: Any = {name: without_waiting(rows[name], device) for name in column_names(rows)}
    return TensorDict(columns, batch_size=rows.batch_size)


def column_names(rows: TensorDict) -> list[str]:
    """The names of tensors: all but the table of media."""
    return [str(name) for name in rows.keys() if name != MEDIA_TABLE]  # noqa: SIM118 (a TensorDict)


def take_rows(data: TensorDict, rows: list[int]) -> TensorDict:
    """The rows of a micro-batch, without waiting for the device; an empty micro-batch has one row
    of a single token, which no loss counts."""
    if rows:
        index = torch.tensor(rows)
        columns: Any = {
            name: data[name][without_waiting(index, data[name].device)]
            for name in column_names(data)
        }
        chosen = TensorDict(columns, batch_size=len(rows))
        if MEDIA_TABLE in data.keys():  # noqa: SIM118 (a TensorDict)
            chosen.set_non_tensor(MEDIA_TABLE, data.get_non_tensor(MEDIA_TABLE))
        return chosen
    blank: Any = {
        name: torch.zeros(
            1, *data[name].shape[1:], dtype=data[name].dtype, device=data[name].device
        )
        for name in column_names(data)
        if name != MEDIA_ROW
    }
    blank["attention_mask"][:, 0] = 1
    return TensorDict(blank, batch_size=1)


def put_rows(columns: Columns, outputs: Columns, rows: list[int], num_rows: int) -> None:
    """Write the outputs of a micro-batch into the columns of the whole batch, without waiting."""
    for name, part in outputs.items():
        if name not in columns:
            columns[name] = part.new_zeros(num_rows, *part.shape[1:])
        index = without_waiting(torch.tensor(rows, dtype=torch.long), part.device)
        columns[name].index_copy_(0, index, part[: len(rows)])  # an empty one has a blank row


def row_lengths(data: TensorDict) -> list[int]:
    """Tokens of each row."""
    return data["attention_mask"].sum(1).tolist()


def sum_of_columns(columns: Columns, rows: TensorDict) -> tuple[Tensor, dict[str, Any]]:
    """A loss of every output, for passes whose gradient is thrown away."""
    return torch.stack([column.sum() for column in columns.values()]).sum(), {}
