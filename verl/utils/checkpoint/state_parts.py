"""An optimizer's state as a tree of plain data and, by name, the parts of its tensors.

    {"masters": {"w": T}, "optimizer": {"state": {0: {"exp_avg": T, "step": T}}}, "skipped": 3}
        ->  {"masters": {}, "optimizer": {"state": {0: {}}}, "skipped": 3}
        and masters/w, optimizer/state/0/exp_avg, optimizer/state/0/step

The plain tree is the same on every rank. The parts are what this rank holds; read back on another
number of ranks, a master is divided as the engine now divides it, and a moment as its master.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl.utils.checkpoint.piece_files import StoredTensor, read_piece
from verl.utils.checkpoint.pieces import FlatSlice, Part, local_tensor, piece_of, whole

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
            kept = [visit(item, (*path, str(place))) for place, item in enumerate(value)]
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
