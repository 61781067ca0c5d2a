"""Micro-batches through the stages of a pipeline, on megatron-core's schedules (1F1B, interleaved).

    stage 0   f0 f1 b0 f2 b1 b2        hidden states go forward, their gradients backward
    stage 1      f0 b0 f1 b1 f2 b2     columns, loss and reports are the last stage's

Every stage gets the same rows and packs them itself, so only hidden states travel. Afterwards the
last stage hands its columns to the others, which compute the same reports from them.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from tensordict import TensorDict
from torch import Tensor

from verl.workers.engine.megatron.cpu import CpuForCuda, has_gpu
from verl.workers.engine.megatron.layout import Layout

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
