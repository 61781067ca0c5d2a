"""Columns by name: choose, require, rename, join."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from tensordict import TensorDict

from verl.protocol.union import list_of_dict_to_dict_of_list
from verl.utils.tensor_rows import BatchError

Entry = TypeVar("Entry")


def select_columns(batch: TensorDict | None, keys: Iterable[str] | None) -> TensorDict | None:
    """A table of the columns `keys`, or of all for None, that shares their tensors."""
    if batch is not None:
        return batch.select(*(batch.keys() if keys is None else keys))
    missing = list(keys or ())
    if missing:
        raise KeyError(f"there are no tensors {missing}: the batch has no tensors at all")
    return None


def pick(entries: Mapping[str, Entry], keys: Iterable[str] | None) -> dict[str, Entry]:
    """Those of `keys` that are there; all entries for None."""
    return {key: entries[key] for key in (entries if keys is None else keys) if key in entries}


def check_present(keys: Iterable[str], entries: Collection[str], action: str) -> None:
    missing = [key for key in keys if key not in entries]
    if missing:
        raise BatchError(f"cannot {action} {missing}; there is {sorted(entries)}")


def renaming(old_keys: Any, new_keys: Any, present: Collection[str]) -> dict[str, str]:
    """Old name to new name, for two names or two equally long lists of names."""
    old, new = _as_names(old_keys, "old_keys"), _as_names(new_keys, "new_keys")
    if len(old) != len(new):
        raise BatchError(f"cannot rename {len(old)} columns to {len(new)} names: {old} to {new}")
    check_present(old, present, "rename")
    names = [name for name in present if name not in old] + new
    if len(set(names)) < len(names):
        raise BatchError(f"renaming {old} to {new} would give two columns one name")
    return dict(zip(old, new, strict=True))


def _as_names(keys: Any, argument: str) -> list[str]:
    if keys is None:
        return []
    if isinstance(keys, str):
        return [keys]
    if isinstance(keys, list):
        return keys
    raise TypeError(f"{argument} is a name or a list of names, got {type(keys).__name__}")


def concat_arrays(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The rows of all parts below each other; every part must have the same arrays."""
    pieces = list_of_dict_to_dict_of_list(parts)
    for key, arrays in pieces.items():
        widths = {array.shape[1:] for array in arrays}
        if len(widths) > 1:
            raise BatchError(f"cannot concatenate array {key!r}: shapes {sorted(widths)} per row")
    return {key: np.concatenate(arrays) for key, arrays in pieces.items()}
