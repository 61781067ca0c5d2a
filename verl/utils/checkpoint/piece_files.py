"""Sharded tensors on disk: each rank writes what it holds, any rank reads what it needs.

    NAME.rank_R_of_W.json            the pieces that rank R wrote: dtype, shape, start, size, file
    NAME.rank_R_of_W*.safetensors    their bytes

No rank waits for another. Replicated tensors are divided among the ranks, so each element is
written once. Reading takes from all files the bytes of the wanted piece and no others; the number
of ranks that read need not be the number that wrote. Syncing and hashing is left to `store`.

`split_state` turns an optimizer's state into a tree of plain data and, by name, its tensors:

    {"masters": {"w": T}, "optimizer": {"state": {0: {"exp_avg": T, "step": T}}}, "skipped": 3}
        ->  {"masters": {}, "optimizer": {"state": {0: {}}}, "skipped": 3}
        and masters/w, optimizer/state/0/exp_avg, optimizer/state/0/step

The plain tree is the same on every rank. Read back on another number of ranks, a master weight is
sharded as the engine now shards it, and a moment as its master.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl.utils.checkpoint.layout import CheckpointCorruptError, naming, write_all
from verl.utils.checkpoint.pieces import (
    FlatSlice,
    Part,
    Piece,
    divide,
    is_division,
    is_kept_by_this_rank,
    local_tensor,
    overlaps,
    piece_of,
    whole,
)
from verl.utils.checkpoint.safetensors_file import TensorLocation, read_header, write_safetensors
from verl.utils.checkpoint.tensor_store import (
    DEFAULT_SHARD_BYTES,
    MAX_TREE_BYTES,
    SAFETENSORS_DTYPES,
    TORCH_DTYPES,
    NamedArray,
    as_source,
    file_suffix,
    grouped,
)

FORMAT = "verl-pieces"
VERSION = 1
HF_DTYPES = {
    safetensors: TORCH_DTYPES[name]
    for name, safetensors in SAFETENSORS_DTYPES.items()
    if name in TORCH_DTYPES
}
MIN_DIVIDED_ELEMENTS = 1 << 16
"""What every rank holds and is smaller than this is written by rank 0 alone."""


@dataclass(frozen=True, kw_only=True)
class HeldPiece:
    """A piece that this rank will write."""

    name: str
    piece: Piece
    tensor: Tensor


@dataclass(frozen=True, kw_only=True)
class StoredPiece:
    piece: Piece
    file: Path
    location: TensorLocation


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor on disk: its pieces hold each element exactly once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[StoredPiece]


def rank_name(name: str, rank: int, world_size: int) -> str:
    """What a rank's own files are called."""
    return f"{name}.rank_{rank}_of_{world_size}"


def pieces_to_write(parts: Mapping[str, Part], *, rank: int, world_size: int) -> list[HeldPiece]:
    """This rank's share of the work; the tensors are the engine's own, not copies."""
    held: list[HeldPiece] = []
    for name, part in parts.items():
        piece, tensor = piece_of(part), local_tensor(part)
        if isinstance(part, DTensor):
            if not is_kept_by_this_rank(part):
                continue
        elif not isinstance(part, FlatSlice):
            is_small = tensor.numel() < MIN_DIVIDED_ELEMENTS
            if is_small and rank > 0:
                continue
            if not is_small and world_size > 1:
                piece = divide(tensor.shape, rank, world_size)
                tensor = tensor.reshape(-1)[piece.start[0] :][: piece.num_elements]
        is_empty_tensor = prod(piece.shape) == 0
        if piece.num_elements or (is_empty_tensor and rank == 0):
            held.append(HeldPiece(name=name, piece=piece, tensor=tensor))
    return held


def write_pieces(
    folder: str | Path,
    name: str,
    held: Sequence[HeldPiece],
    *,
    rank: int,
    world_size: int,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write and sync this rank's files; another machine could not sync them for us."""
    folder, own = Path(folder), rank_name(name, rank, world_size)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = [NamedArray(name=item.name, array=item.tensor) for item in held]
    shards = list(grouped(arrays, max_shard_bytes))
    files = [f"{own}{file_suffix(number, len(shards))}" for number in range(len(shards))]
    file_of = {
        array.name: file for file, shard in zip(files, shards, strict=True) for array in shard
    }
    for file, shard in zip(files, shards, strict=True):
        write_safetensors(folder / file, [as_source(array) for array in shard], sync=True)
    entries = {
        item.name: {
            "dtype": array.dtype,
            "shape": list(item.piece.shape),
            "start": list(item.piece.start),
            "size": list(item.piece.size),
            "file": file_of[item.name],
        }
        for item, array in zip(held, arrays, strict=True)
    }
    content = {"format": FORMAT, "version": VERSION, "pieces": entries}
    path = folder / f"{own}.json"
    with naming(path), open(path, "xb", buffering=0) as stream:
        write_all(stream, json.dumps(content, separators=(",", ":")).encode())
        os.fsync(stream.fileno())


def saved_world_size(folder: str | Path, name: str) -> int | None:
    """How many ranks wrote `name` here; None if none did. All of them must have."""
    pattern = re.compile(rf"{re.escape(name)}\.rank_([0-9]+)_of_([0-9]+)\.json")
    found = [
        match for path in Path(folder).glob("*.json") if (match := pattern.fullmatch(path.name))
    ]
    if not found:
        return None
    world_size = int(found[0][2])
    if sorted((int(m[1]), int(m[2])) for m in found) != [
        (r, world_size) for r in range(world_size)
    ]:
        names = ", ".join(sorted(match[0] for match in found))
        raise CheckpointCorruptError(Path(folder), [f"it lacks the files of some ranks: {names}"])
    return world_size


def stored_tensors(folder: str | Path, name: str) -> dict[str, StoredTensor]:
    """What all ranks wrote under `name`, by tensor; only the lists are read."""
    folder = Path(folder)
    by_tensor: dict[str, list[tuple[str, StoredPiece]]] = defaultdict(list)
    for rank in range(world_size := saved_world_size(folder, name) or 0):
        path = folder / f"{rank_name(name, rank, world_size)}.json"
        try:
            for tensor, dtype, stored in _listed(path):
                by_tensor[tensor].append((dtype, stored))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointCorruptError(path, [f"not a list of pieces: {error}"]) from error
    return {tensor: _joined(folder, tensor, pieces) for tensor, pieces in by_tensor.items()}


def stored_hf_tensors(folder: str | Path) -> dict[str, StoredTensor]:
    """The weights in a model folder, each of which is one whole piece."""
    return {
        name: StoredTensor(
            dtype=_dtype_of(file, location),
            shape=location.shape,
            pieces=[StoredPiece(piece=whole(location.shape), file=file, location=location)],
        )
        for file in sorted(Path(folder).glob("*.safetensors"))
        for name, location in read_header(file).items()
    }


def read_piece(stored: StoredTensor, wanted: Piece) -> Tensor:
    """The elements of `wanted`, flat, on the CPU, in the dtype they were stored in."""
    values = torch.empty(wanted.num_elements, dtype=stored.dtype)
    buffer = values.view(torch.uint8).numpy().data if values.numel() else memoryview(b"")
    num_read = 0
    for source in stored.pieces:
        shared = overlaps(source.piece, wanted)
        if not shared:
            continue
        with naming(source.file), open(source.file, "rb", buffering=0) as file:
            for here, there, count in shared:
                at, into, length = (n * values.itemsize for n in (here, there, count))
                _read_at(file.fileno(), source.location.start + at, buffer[into : into + length])
                num_read += count
    if num_read != wanted.num_elements:
        raise CheckpointCorruptError(
            stored.pieces[0].file, [f"{num_read} of {wanted.num_elements} elements are there"]
        )
    return values


def read_into(stored: StoredTensor, part: Part) -> None:
    """Fill what this rank holds, in place; another dtype is converted."""
    local = local_tensor(part)
    local.copy_(read_piece(stored, piece_of(part)).view(local.shape))


def _dtype_of(file: Path, location: TensorLocation) -> torch.dtype:
    if location.dtype not in HF_DTYPES:
        raise CheckpointCorruptError(file, [f"it has weights of the kind {location.dtype}"])
    return HF_DTYPES[location.dtype]


def _read_at(descriptor: int, position: int, buffer: memoryview) -> None:
    while buffer:
        count = os.preadv(descriptor, [buffer], position)
        if count == 0:
            raise OSError(0, "the file ends before its last piece")
        position, buffer = position + count, buffer[count:]


def _listed(path: Path) -> list[tuple[str, str, StoredPiece]]:
    with naming(path), open(path, "rb") as stream:
        text = stream.read(MAX_TREE_BYTES + 1)
    content = json.loads(text)
    if (content["format"], content["version"]) != (FORMAT, VERSION):
        raise ValueError(f"format {content['format']!r} version {content['version']!r}")
    headers: dict[str, dict[str, TensorLocation]] = {}
    found: list[tuple[str, str, StoredPiece]] = []
    for name, entry in content["pieces"].items():
        file = entry["file"]
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"it names {file!r}, which is not a file beside it")
        if file not in headers:
            headers[file] = read_header(path.parent / file)
        piece = Piece(**{key: _extents(entry[key]) for key in ("shape", "start", "size")})
        location = headers[file][name]
        if location.num_bytes != piece.num_elements * TORCH_DTYPES[entry["dtype"]].itemsize:
            raise ValueError(f"{name!r} has {location.num_bytes} bytes, which is not {piece}")
        stored = StoredPiece(piece=piece, file=path.parent / file, location=location)
        found.append((name, entry["dtype"], stored))
    return found


def _extents(value: Any) -> tuple[int, ...]:
    if any(type(extent) is not int for extent in value):
        raise ValueError(f"{value} are not whole numbers")
    return tuple(value)


def _joined(folder: Path, name: str, pieces: list[tuple[str, StoredPiece]]) -> StoredTensor:
    kinds = {(dtype, stored.piece.shape) for dtype, stored in pieces}
    if len(kinds) != 1:
        raise CheckpointCorruptError(folder, [f"the ranks disagree about {name}: {kinds}"])
    ((dtype, shape),) = kinds
    if not is_division([stored.piece for _, stored in pieces]):
        raise CheckpointCorruptError(
            folder,
            [f"the pieces of {name} overlap, or leave some of its {prod(shape)} elements out"],
        )
    return StoredTensor(
        dtype=TORCH_DTYPES[dtype], shape=shape, pieces=[stored for _, stored in pieces]
    )


MASTERS = "masters/"
_MOMENT = re.compile(r"(?P<owner>.*)optimizer/state/(?P<number>[0-9]+)/[^/]+")


def split_state(state: Any) -> tuple[Any, dict[str, Part]]:
    """The plain tree, every container of it new, and the tensors that were taken out of it."""
    parts: dict[str, Part] = {}

    def visit(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            kept = {key: visit(item, (*path, str(key))) for key, item in value.items()}
            return {key: item for key, item in kept.items() if item is not _TAKEN}
        if isinstance(value, list):
            kept = [visit(item, (*path, str(index))) for index, item in enumerate(value)]
            return [None if item is _TAKEN else item for item in kept]
        if isinstance(value, (Tensor, FlatSlice)):
            parts["/".join(path)] = value
            return _TAKEN
        return value

    return visit(state, ()), parts


def join_state(tree: Any, parts: Mapping[str, Part]) -> Any:
    """Put parts back where `split_state` took them."""
    for name, part in parts.items():
        *path, last = name.split("/")
        container = tree
        for key in path:
            container = container[_key_in(container, key)]
        container[int(last) if isinstance(container, list) else last] = part
    return tree


def masters(parts: Mapping[str, Part]) -> dict[str, Part]:
    """The fp32 weights among an optimizer's parts, by the parameter's name."""
    return {name.partition(MASTERS)[2]: part for name, part in parts.items() if MASTERS in name}


def stored_masters(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    return {name.partition(MASTERS)[2]: item for name, item in stored.items() if MASTERS in name}


def differences(stored: Mapping[str, StoredTensor], current: Mapping[str, Part]) -> Iterator[str]:
    """A sentence for each tensor that is not the same one in the checkpoint and in the engine."""
    for name in sorted(stored.keys() | current.keys()):
        old = list(stored[name].shape) if name in stored else "missing"
        new = list(piece_of(current[name]).shape) if name in current else "missing"
        if old != new:
            yield f"{name} is {old} there and {new} here"


def read_parts(
    stored: Mapping[str, StoredTensor], current: Mapping[str, Part]
) -> Iterator[tuple[str, Part]]:
    """This rank's parts of everything in `stored`; what `current` lacks are moments."""
    for name, tensor in stored.items():
        yield name, read_like(tensor, _model_for(name, tensor, current))


def read_like(stored: StoredTensor, model: Part | None) -> Part:
    """What `model` holds of its tensor, taken from disk; None is the whole tensor."""
    if model is None:
        return read_piece(stored, whole(stored.shape)).view(stored.shape)
    values = read_piece(stored, piece_of(model))
    if isinstance(model, FlatSlice):
        return replace(model, tensor=values)
    local = values.view(local_tensor(model).shape)
    if not isinstance(model, DTensor):
        return local
    return DTensor.from_local(
        local.to(local_tensor(model).device),
        model.device_mesh,
        model.placements,
        run_check=False,
        shape=torch.Size(stored.shape),
        stride=model.stride(),
    )


def _model_for(name: str, stored: StoredTensor, current: Mapping[str, Part]) -> Part | None:
    """How the engine divides the tensor; torch numbers an optimizer's masters in their order."""
    if name in current and piece_of(current[name]).shape == stored.shape:
        return current[name]
    found = _MOMENT.fullmatch(name)
    if found is None:
        return None
    prefix = f"{found['owner']}{MASTERS}"
    in_order = [part for path, part in current.items() if path.startswith(prefix)]
    number = int(found["number"])
    master = in_order[number] if number < len(in_order) else None
    return master if master is not None and piece_of(master).shape == stored.shape else None


def _key_in(container: Any, key: str) -> str | int:
    return key if isinstance(container, dict) and key in container else int(key)


class _Taken:
    """Stands where a tensor was until its container is rebuilt."""


_TAKEN = _Taken()
