"""Where the weights of a checkpoint are, as whole tensors that are put together when asked for.

Each function looks for one layout and returns None if it is not there. Nothing is held in memory:
a `LazyTensor` reads the parts of one tensor from the files of all ranks.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from verl.model_merger.torch_file import TorchShard, TorchTensor, read_torch_file
from verl.utils.checkpoint.piece_files import (
    StoredTensor,
    read_piece,
    stored_hf_tensors,
    stored_masters,
    stored_tensors,
)
from verl.utils.checkpoint.pieces import whole


@dataclass(frozen=True, kw_only=True)
class LazyTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


LazyWeights = dict[str, LazyTensor]


def weights_of_shard_files(folder: Path) -> LazyWeights | None:
    """`model_world_size_W_rank_R.pt`, one file per rank."""
    found = sorted(folder.glob("model_world_size_*_rank_*.pt"))
    if not found:
        return None
    world_size = saved_world_size(folder, found)
    files = [folder / f"model_world_size_{world_size}_rank_{r}.pt" for r in range(world_size)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing[:4])}; every rank's file is needed")
    ranks = [read_torch_file(file, rank=rank) for rank, file in enumerate(files)]
    return {name: joined(folder, name, [rank.get(name) for rank in ranks]) for name in ranks[0]}


def weights_of_pieces(folder: Path) -> LazyWeights | None:
    """The weights that ranks have written in pieces, or their fp32 masters."""
    stored = stored_tensors(folder, "model") or stored_masters(stored_tensors(folder, "optimizer"))
    return lazy(stored) if stored else None


def weights_of_model_folder(folder: Path) -> LazyWeights | None:
    """What `from_pretrained` loads."""
    stored = stored_hf_tensors(folder)
    return lazy(stored) if stored else None


def lazy(stored: dict[str, StoredTensor]) -> LazyWeights:
    return {
        name: LazyTensor(dtype=tensor.dtype, shape=tensor.shape, read=partial(read_whole, tensor))
        for name, tensor in stored.items()
    }


def lazy_tensor(tensor: Tensor) -> LazyTensor:
    """A tensor that is in memory already."""
    return LazyTensor(dtype=tensor.dtype, shape=tuple(tensor.shape), read=lambda: tensor)


def read_whole(stored: StoredTensor) -> Tensor:
    return read_piece(stored, whole(stored.shape)).view(stored.shape)


def saved_world_size(folder: Path, files: list[Path]) -> int:
    path = folder / "fsdp_config.json"
    if path.is_file():
        return int(json.loads(path.read_text())["world_size"])
    sizes = {re.findall(r"[0-9]+", file.name)[0] for file in files}
    if len(sizes) != 1:
        raise ValueError(
            f"{folder} holds files of runs on {' and '.join(sorted(sizes))} ranks and no "
            "fsdp_config.json that says which one counts; remove the others"
        )
    return int(sizes.pop())


def joined(folder: Path, name: str, parts: list[TorchTensor | TorchShard | None]) -> LazyTensor:
    """One tensor from all ranks' parts of it."""
    first = parts[0]
    if isinstance(first, TorchTensor):
        return LazyTensor(dtype=first.dtype, shape=first.shape, read=first.read)
    shards = [part for part in parts if isinstance(part, TorchShard) and part.is_first_copy]
    assert isinstance(first, TorchShard)
    dim = first.sharded_dim
    kinds = {(shard.shape, shard.sharded_dim, shard.local.dtype) for shard in shards}
    if len(kinds) != 1 or None in parts:
        raise ValueError(f"{folder}: the ranks disagree about {name}")
    if dim is None:
        return LazyTensor(dtype=first.local.dtype, shape=first.shape, read=first.local.read)
    in_order = sorted(shards, key=lambda shard: shard.place)
    local_parts = [shard.local for shard in in_order]
    others = {(*t.shape[:dim], *t.shape[dim + 1 :]) for t in local_parts}
    is_whole = sum(t.shape[dim] for t in local_parts) == first.shape[dim]
    if others != {(*first.shape[:dim], *first.shape[dim + 1 :])} or not is_whole:
        raise ValueError(f"{folder}: the parts of {name} do not make up a tensor of {first.shape}")
    return LazyTensor(
        dtype=first.local.dtype,
        shape=first.shape,
        read=lambda: torch.cat([local.read() for local in local_parts], dim=dim),
    )
