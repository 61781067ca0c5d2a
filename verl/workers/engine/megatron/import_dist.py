"""Weights from a distributed checkpoint of Megatron's own, into whatever layout this is.

megatron-core says of every local weight which box of which stored tensor it is; the boxes are read
by `verl.utils.checkpoint.dist_checkpoint`, which unpickles nothing. Rows that fill the vocabulary
up differ between layouts: those past the vocabulary are zero here.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from verl.utils.checkpoint.dist_checkpoint import DistTensor, read_index
from verl.workers.engine.megatron.model import ModelChunk

OF_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


@torch.no_grad()
def load_dist_checkpoint(
    chunks: list[ModelChunk], folder: Path, *, prefix: str, vocabulary: int, is_fresh_critic: bool
) -> None:
    """Fill every weight of this rank. A critic that is made of a language model starts with a head
    of zeros."""
    stored = read_index(folder)
    for chunk in chunks:
        for part in chunk_parts(chunk, prefix, stored):
            name = part.key.removeprefix(prefix)
            found = stored.get(part.key)
            assert part.data is not None
            part.data.zero_()
            if name.startswith("output_layer.") and is_fresh_critic:
                if found is not None and found.shape == tuple(part.global_shape):
                    copy(part, found, None)
            elif found is None:
                raise ValueError(
                    f"{folder} has no {part.key}; it has {', '.join(list(stored)[:3])}, ... "
                    "(megatron.dist_checkpointing_prefix comes before each name)"
                )
            else:
                copy(part, found, vocabulary if name in OF_VOCABULARY else None)


def copy(part: ShardedTensor, found: DistTensor, num_rows: int | None) -> None:
    """Of a tensor with rows for a vocabulary, those of real tokens."""
    shape, start = tuple(part.global_shape), tuple(part.global_offset)
    added = part.prepend_axis_num
    size = (1,) * added + tuple(part.local_shape)
    target = part.data
    assert target is not None
    if num_rows is not None:
        num_real = max(0, min(size[0], min(num_rows, found.shape[0]) - start[0]))
        if found.shape[0] < num_rows or found.shape[1:] != shape[1:]:
            raise ValueError(
                f"{found.name} has the shape {list(found.shape)} for {num_rows} tokens of "
                f"{shape[1]} numbers: the checkpoint is of another model"
            )
        size, target = (num_real, *size[1:]), target[:num_real]
        if not num_real:
            return
    elif found.shape != shape:
        raise ValueError(
            f"{found.name} has the shape {list(found.shape)}, and the model {list(shape)}: the "
            "checkpoint is of another model"
        )
    target.copy_(found.read(start, size).view(target.shape))


def chunk_parts(
    chunk: ModelChunk, prefix: str, stored: Mapping[str, DistTensor]
) -> Iterator[ShardedTensor]:
    """Local weights, or views of them, with their places in stored tensors.

    Layers are stored as one tensor for all, or each by itself, as their writer chose.
    """
    ways = [list(parts(chunk, prefix, apart)) for apart in (False, True)]
    in_file = [[part.key in stored for part in way] for way in ways]
    yield from max(zip(in_file, ways, strict=True), key=lambda pair: sum(pair[0]))[1]


def parts(chunk: ModelChunk, prefix: str, layers_apart: bool) -> Iterator[ShardedTensor]:
    described: Any = chunk.sharded_state_dict(
        prefix=prefix, metadata={"non_homogeneous_layers": layers_apart}
    )
    for value in nested_values(described):
        made = value.build() if isinstance(value, ShardedTensorFactory) else value
        for one in nested_values(made) if isinstance(made, (dict, list)) else [made]:
            if isinstance(one, ShardedTensor):
                yield one
