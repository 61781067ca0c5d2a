"""Weights between Hugging Face names and this rank's shards in megatron-core.

A local parameter is a list of pieces: a box of it equals a box of a Hugging Face tensor. Loading
copies boxes in, exporting copies them out and adds up what the ranks have, and optimizer state,
which has the shape of its parameter, moves between layouts by the same boxes.

    linear_qkv   rows by KV group: its query heads, then its key, then its value
    linear_fc1   rows by tensor rank: its gate columns, then its up columns
    experts      gate_up_proj[e], down_proj[e] of one Hugging Face tensor per layer
    embedding    rows of the vocabulary, then zeros up to a multiple of the tensor size
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from verl.workers.engine.megatron.layout import is_latent, num_experts, padded_vocabulary
from verl.workers.engine.megatron.model import is_tied, sparse_layers

Box = tuple[slice | int, ...]
"""Where a piece is in a tensor; an index drops its dimension."""


@dataclass(frozen=True)
class Piece:
    """`local[inside] == whole[outside]` for a local parameter and the tensor `name`."""

    name: str
    outside: Box
    inside: Box
    is_owner: bool
    """Whether this rank contributes it to the whole tensor; of replicas, one does."""


def local_pieces(
    chunks: list[GPTModel], hf_config: Any
) -> Iterator[tuple[int, str, Tensor, list[Piece]]]:
    """Every local weight with its chunk, its name there, and its pieces."""
    raise NotImplementedError


def load_weights(
    chunks: list[GPTModel], hf_config: Any, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Copy this rank's shards out of whole tensors; one that is missing or unknown is refused."""
    raise NotImplementedError


def export_weights(chunks: list[GPTModel], hf_config: Any) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors under Hugging Face names, one at a time; every rank must take part."""
    raise NotImplementedError
