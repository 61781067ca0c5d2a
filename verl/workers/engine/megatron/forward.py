"""A micro-batch through this rank's part of the model: packed rows in, columns out.

    rows -> packed tokens, filled up -> embedding -> layers -> hidden states of the last stage
         -> those that predict response tokens -> this rank's share of the vocabulary -> columns

Tokens are filled up to a number that context and tensor ranks divide; what fills up is a sequence
of its own that nobody reads. With sequence parallelism each tensor rank has its share of the tokens
between the matrices of a layer, and all of them before the output layer.

Micro-batches through the stages of a pipeline, on megatron-core's schedules (1F1B, interleaved).

    stage 0   f0 f1 b0 f2 b1 b2        hidden states go forward, their gradients backward
    stage 1      f0 b0 f1 b1 f2 b2     columns, loss and reports are the last stage's

Every stage gets the same rows and packs them itself, so only hidden states travel. Afterwards the
last stage hands its columns to the others, which compute the same reports from them.

Log-probabilities where each rank of a tensor group has the logits of its part of the vocabulary.

The logits are never gathered. Each rank computes log-sum-exp and mean of the scores over its own
part, and the ranks exchange three numbers per token.

    log Z = log sum_r exp(log Z_r)        mean = sum_r exp(log Z_r - log Z) mean_r
    log p(t) = z_t - log Z                H = log Z - mean

Weights come filled up to a multiple of the ranks; rows past the vocabulary belong to no token and
take no part.
"""

# megatron-core's own annotations leave out or mix up types of groups and modules.
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
# pyright: reportAttributeAccessIssue=false

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from tensordict import TensorDict
from torch import Tensor

from verl.models.attention import AttentionLayout
from verl.models.divergence import log_probs_at, top_log_probs
from verl.models.head import (
    OutputHead,
    add_product_,
    gather_rows,
    gradient_of_logits,
    logit_statistics,
    raw_logits,
    row_chunks,
    scaled_logits,
    scoring_chunks,
    token_log_probs,
)
from verl.models.kernels.availability import can_run_triton
from verl.models.packed import PackedLayout
from verl.models.ulysses import SequenceShard, UlyssesLayout
from verl.utils.device import without_waiting
from verl.utils.distributed import all_reduce_
from verl.workers.engine.base import Columns
from verl.workers.engine.inputs import ModelInputs
from verl.workers.engine.megatron.attention import PackedRows, rotary_angles
from verl.workers.engine.megatron.cpu import CpuForCuda, has_gpu
from verl.workers.engine.megatron.layout import Layout
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


Stage = Callable[[GPTModel, TensorDict], Tensor]
"""From rows to the hidden states after a chunk's layers."""

End = Callable[[GPTModel, TensorDict, Tensor], tuple[Tensor, Any]]
"""From rows and the last hidden states to the loss (any number where nothing is trained) and what
the caller wants to have of the micro-batch."""


def run_pipeline(
    chunks: Sequence[GPTModel],
    layout: Layout,
    micro_batches: Sequence[TensorDict],
    stage: Stage,
    end: End,
    *,
    forward_only: bool,
) -> list[Any]:
    """What `end` gives for each micro-batch; nothing on stages before the last.

    The number of micro-batches must be a multiple of the stages where these are interleaved.
    """

    def step(data: Any, chunk: GPTModel) -> tuple[Tensor, Callable[..., Any]]:
        rows = next(data)
        hidden = stage(chunk, rows)
        return hidden, partial(finish, chunk, rows)

    def finish(
        chunk: GPTModel, rows: TensorDict, hidden: Tensor, non_loss_data: bool = False
    ) -> Any:
        loss, kept = end(chunk, rows, hidden)
        # Three values: megatron-core divides the loss of a pair by the number of micro-batches.
        return kept if non_loss_data else (loss, torch.zeros((), dtype=torch.int), kept)

    is_interleaved = layout.virtual_pipeline is not None
    data = [iter(micro_batches) for _ in chunks]
    with nullcontext() if has_gpu() else CpuForCuda():
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=data if is_interleaved else data[0],
            model=list(chunks) if is_interleaved else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=1,  # shapes travel with the tensors
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


class VocabularyShard:
    """This rank's rows of the output layer."""

    def __init__(self, weight: Tensor, vocabulary: int, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks = dist.get_world_size(group)
        self.start = dist.get_rank(group) * len(weight)
        self.head = OutputHead(weight[: max(0, vocabulary - self.start)])

    def log_probs(
        self, hidden: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """log p(target) and the entropy, both (rows,) in fp32, differentiable."""
        if self.num_ranks == 1:
            return token_log_probs(hidden, self.head, targets, temperature=temperature)
        return _ShardedLogProbs.apply(  # pyright: ignore[reportReturnType]
            hidden, self.head.weight, targets, self, temperature
        )

    @torch.no_grad()
    def sum_squared_probs(self, hidden: Tensor, temperature: float) -> Tensor:
        """sum_v p_v^2 of each row's distribution, (rows,) in fp32."""
        log_sum, log_square = hidden.new_empty((2, len(hidden)), dtype=torch.float32)
        for rows in row_chunks(len(hidden), len(self.head.weight)):
            z = scaled_logits(hidden[rows], self.head, temperature)
            log_sum[rows], log_square[rows] = z.logsumexp(-1), (2 * z).logsumexp(-1)
        parts = self.gather(torch.stack([log_sum, log_square])).logsumexp(0)
        return (parts[1] - 2 * parts[0]).exp()

    def top(self, hidden: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        self._refuse_parts("the likeliest tokens")
        return top_log_probs(hidden, self.head, k, temperature=temperature)

    def log_probs_at(self, hidden: Tensor, ids: Tensor, temperature: float) -> Tensor:
        self._refuse_parts("log-probabilities of given tokens")
        return log_probs_at(hidden, self.head, ids, temperature=temperature)

    def own(self, targets: Tensor) -> Tensor:
        """Targets as rows of this rank's weight; -1 for those of other ranks."""
        local = targets - self.start
        return torch.where((local >= 0) & (local < len(self.head.weight)), local, -1)

    def gather(self, values: Tensor) -> Tensor:
        """The values of all ranks, stacked."""
        parts = [torch.empty_like(values) for _ in range(self.num_ranks)]
        dist.all_gather(parts, values.contiguous(), group=self.group)
        return torch.stack(parts)

    def _refuse_parts(self, what: str) -> None:
        if self.num_ranks > 1:
            raise ValueError(
                f"{what} are asked for, but megatron.tensor_model_parallel_size is "
                f"{self.num_ranks} and no rank has all logits; set it to 1, or use strategy=fsdp"
            )


class _ShardedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        shard: VocabularyShard,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        own, head = shard.own(targets), shard.head
        log_prob, log_sum, mean = hidden.new_empty((3, len(hidden)), dtype=torch.float32)
        for rows in scoring_chunks(hidden, len(weight)):
            log_prob[rows], log_sum[rows], mean[rows] = logit_statistics(
                raw_logits(hidden[rows], head), own[rows], head, temperature
            )
        score = all_reduce_(torch.where(own >= 0, log_prob + log_sum, 0.0), group=shard.group)
        log_sums, means = shard.gather(torch.stack([log_sum, mean])).unbind(1)
        log_sum = log_sums.logsumexp(0)
        mean = ((log_sums - log_sum).exp() * means).sum(0)
        ctx.save_for_backward(hidden, weight, own, log_sum, mean)
        ctx.head, ctx.temperature = head, temperature
        return score - log_sum, log_sum - mean

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The hidden states get the part of this rank's logits; who copied them to the ranks adds
        the parts up."""
        hidden, weight, own, log_sum, mean = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in scoring_chunks(hidden, len(weight)):
            vectors = (x[rows] for x in (own, log_sum, mean, *gradients))
            grad = gradient_of_logits(
                raw_logits(hidden[rows], ctx.head),
                *vectors,
                head=ctx.head,
                temperature=ctx.temperature,
            )
            grad_hidden[rows] = grad @ weight
            add_product_(grad_weight, grad.t(), hidden[rows])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None
