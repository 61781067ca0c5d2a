"""A micro-batch through this rank's part of the model: packed rows in, columns out.

    rows -> packed tokens, filled up -> embedding -> layers -> hidden states of the last stage
         -> those that predict response tokens -> this rank's share of the vocabulary -> columns

Tokens are filled up to a number that context and tensor ranks divide; what fills up is a sequence
of its own that nobody reads. With sequence parallelism each tensor rank has its share of the tokens
between the matrices of a layer, and all of them before the output layer.
"""

# megatron-core's own annotations leave out or mix up types of groups and modules.
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
# pyright: reportAttributeAccessIssue=false

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from tensordict import TensorDict
from torch import Tensor

from verl.models.attention import AttentionLayout
from verl.models.head import gather_rows
from verl.models.kernels.availability import can_run_triton
from verl.models.packed import PackedLayout
from verl.models.ulysses import SequenceShard, UlyssesLayout
from verl.utils.device import without_waiting
from verl.workers.engine.base import Columns
from verl.workers.engine.inputs import ModelInputs
from verl.workers.engine.megatron.attention import PackedRows, rotary_angles
from verl.workers.engine.megatron.vocabulary import VocabularyShard
from verl.workers.engine.outputs import Outputs


@dataclass(frozen=True)
class PackedPass:
    """The tokens of a micro-batch as this rank gets them."""

    inputs: ModelInputs
    rows: PackedRows

    @classmethod
    def of(cls, rows: TensorDict, device: torch.device) -> "PackedPass":
        inputs = ModelInputs.of(rows, prefix_sharing=False)
        if inputs.media:
            raise ValueError("rows have images, which strategy=megatron cannot train on: use fsdp")
        context = parallel_state.get_context_parallel_group()
        multiple = parallel_state.get_tensor_model_parallel_world_size() * context.size()
        inputs = filled_up(inputs, multiple).to(device)
        assert isinstance(inputs.parts, list)
        layout = packed_layout(inputs.parts, device)
        if context.size() > 1:
            shard = SequenceShard(len(inputs.input_ids), inputs.sources, context)
            inputs, layout = inputs.shard(shard), UlyssesLayout(layout, shard)
        return cls(inputs, PackedRows(layout=layout, positions=inputs.position_ids))


def filled_up(inputs: ModelInputs, multiple: int) -> ModelInputs:
    """With one more sequence, so that the number of tokens is a multiple."""
    missing = -len(inputs.input_ids) % multiple
    if not missing:
        return inputs
    assert isinstance(inputs.parts, list)
    positions = torch.arange(missing).to(inputs.position_ids)
    return replace(
        inputs,
        input_ids=F.pad(inputs.input_ids, (0, missing)),
        position_ids=torch.cat([inputs.position_ids, positions]),
        parts=[*inputs.parts, missing],
    )


def packed_layout(lengths: list[int], device: torch.device) -> AttentionLayout:
    if can_run_triton(device):
        from verl.models.kernel_layout import KernelLayout  # noqa: PLC0415 - needs triton

        return KernelLayout(lengths, device)
    return PackedLayout(lengths, device)


def hidden_states(chunk: GPTModel, packed: PackedPass, padding_id: int | None = None) -> Tensor:
    """What the layers of a chunk make of the tokens, (tokens, 1, hidden); those of a later stage
    start from the tensor that the schedule has given to it."""
    inputs, hidden = packed.inputs, None
    if chunk.pre_process:
        hidden = chunk.embedding(inputs.input_ids[None], inputs.position_ids[None])
        hidden = without_gradient_of(padding_id, hidden, inputs.input_ids)
    angles = None
    if not chunk.config.multi_latent_attention:
        angles = rotary_angles(chunk.rotary_pos_emb.inv_freq, inputs.position_ids)
    return chunk.decoder(
        hidden_states=hidden,
        attention_mask=None,
        rotary_pos_emb=angles,
        packed_seq_params=packed.rows,
    )


def without_gradient_of(padding_id: int | None, hidden: Tensor, input_ids: Tensor) -> Tensor:
    """torch's embedding gives none to its padding token, also where it was sampled."""
    if padding_id is None:
        return hidden
    is_padding = input_ids == padding_id
    if len(hidden) < len(is_padding):  # with sequence parallelism a tensor rank has its share
        rank = parallel_state.get_tensor_model_parallel_rank()
        is_padding = is_padding.split(len(hidden))[rank]
    return torch.where(is_padding[:, None, None], hidden.detach(), hidden)


def columns_of(
    chunk: GPTModel,
    hidden: Tensor,
    packed: PackedPass,
    rows: TensorDict,
    *,
    temperature: float,
    is_value_model: bool,
    outputs: Outputs,
    vocabulary: int,
) -> Columns:
    """Columns of the last stage's hidden states, (B, T), zero where a response has no token."""
    inputs = packed.inputs
    sources = gather_rows(whole_states(chunk, hidden, is_value_model).squeeze(1), inputs.sources)
    if is_value_model:
        head = chunk.output_layer
        values = F.linear(sources, head.weight, head.bias).squeeze(-1)
        return {"values": inputs.unpack(values.float())}
    weight = (
        chunk.shared_embedding_or_output_weight()
        if chunk.share_embeddings_and_output_weights
        else chunk.output_layer.weight
    )
    head = VocabularyShard(weight, vocabulary, parallel_state.get_tensor_model_parallel_group())
    log_probs, entropy = head.log_probs(sources, inputs.targets, temperature)
    columns = {"log_probs": log_probs, "entropy": entropy}
    if outputs.sum_pi_squared:
        columns["sum_pi_squared"] = head.sum_squared_probs(sources, temperature)
    if outputs.top_k:
        columns["top_ids"], columns["top_log_probs"] = head.top(sources, outputs.top_k, temperature)
    if outputs.log_probs_at is not None:
        ids = inputs.pick(without_waiting(rows[outputs.log_probs_at], sources.device)).long()
        columns["log_probs_at"] = head.log_probs_at(sources, ids, temperature)
    return {name: inputs.unpack(values) for name, values in columns.items()}


def whole_states(chunk: GPTModel, hidden: Tensor, is_value_model: bool) -> Tensor:
    """The hidden states of all tokens on every tensor rank.

    Ranks share the vocabulary, so a gradient comes back as a sum over them; a value head is whole
    on each, so each has the whole gradient already.
    """
    if chunk.config.sequence_parallel:
        return gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=not is_value_model
        )
    return hidden if is_value_model else copy_to_tensor_model_parallel_region(hidden)


def column_shapes(rows: TensorDict, outputs: Outputs, *, is_value_model: bool) -> dict[str, Tensor]:
    """Empty tensors like the columns of a pass, for stages that do not compute them."""
    blank = partial(torch.empty, rows["responses"].shape, dtype=torch.float32)
    if is_value_model:
        return {"values": blank()}
    shape = rows["responses"].shape
    columns = {"log_probs": blank(), "entropy": blank()}
    if outputs.sum_pi_squared:
        columns["sum_pi_squared"] = blank()
    if outputs.top_k:
        columns["top_ids"] = torch.empty(*shape, outputs.top_k, dtype=torch.long)
        columns["top_log_probs"] = torch.empty(*shape, outputs.top_k)
    if outputs.log_probs_at is not None:
        columns["log_probs_at"] = torch.empty(rows[outputs.log_probs_at].shape)
    return columns


@torch.no_grad()
def from_last_stage(columns: Columns | None, blank: Columns, device: torch.device) -> Columns:
    """The last stage's columns on every stage of the pipeline."""
    group = parallel_state.get_pipeline_model_parallel_group()
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    held = {}
    for name, like in blank.items():
        value = like.to(device) if columns is None else columns[name].detach().contiguous()
        dist.broadcast(value, src=source, group=group)
        held[name] = value
    return held
