"""DataProto: the batch that crosses every boundary of the program.

A table in three fields. `batch` holds the tensor columns, `non_tensor_batch` the columns of Python
objects (NumPy arrays), both with one row per sample; `meta_info` is about the batch as a whole.
Operations on rows keep the two kinds of columns aligned, and that is the point of the class.

Unless a method says otherwise it returns a new DataProto of the same class that shares `meta_info`
and, where rows are cut rather than chosen, the storage of the tensors. Things that do not fit
together are a `BatchError`, which is a ValueError and an AssertionError.
"""

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from typing_extensions import Self

from verl.protocol.ops import (
    DataProtoConfig,
    DataProtoItem,
    check_distinct,
    check_present,
    common_rows,
    concat_arrays,
    concat_meta_info,
    describe_columns,
    describe_size,
    pick,
    renaming,
    replace_lists_by_arrays,
    select_columns,
    sort_single_dict,
    sort_tensordict,
    unfold_columns,
    union_meta_info,
    union_numpy_dict,
)
from verl.protocol.serialization import deserialize_tensordict, serialize_tensordict
from verl.protocol.storage import Fields, read_fields, write_fields
from verl.utils.tensor_rows import (
    BatchError,
    Column,
    RowIndex,
    as_row_index,
    chunk_sizes,
    concat_rows,
    iterate_minibatches,
    repeat_rows,
    slice_rows,
    split_rows,
    take_rows,
)
from verl.utils.tensordict_utils import non_tensor_stack, union_tensor_dict


@dataclass(eq=False)
class DataProto:
    """A table of samples: tensor columns, object columns, and what holds for all rows."""

    # None when there are no tensors; typed for the many who know that there are.
    batch: TensorDict = None  # pyright: ignore[reportAssignmentType]
    """Tensor columns."""

    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    """Columns of Python objects: prompts as text, ground truths, group labels."""

    meta_info: dict[str, Any] = field(default_factory=dict)
    """What holds for all rows: temperature, token ids, metrics."""

    def __post_init__(self) -> None:
        if self.non_tensor_batch is None:  # pyright: ignore[reportUnnecessaryComparison]
            self.non_tensor_batch = {}
        self.check_consistency()

    def check_consistency(self) -> None:
        """Every column has one row per sample, and there is exactly one row dim."""
        if self.batch is not None and len(self.batch.batch_size) != 1:
            raise BatchError(
                f"a batch has exactly one row dim, got batch_size {tuple(self.batch.batch_size)}"
            )
        num_rows = len(self)
        for key, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray):
                raise BatchError(
                    f"non_tensor_batch[{key!r}] must be an np.ndarray, got {type(array).__name__}; "
                    f"DataProto.from_dict turns lists into arrays"
                )
            if array.shape[:1] != (num_rows,):
                raise BatchError(
                    f"non_tensor_batch[{key!r}] has shape {array.shape}, the batch {num_rows} rows"
                )

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        for array in self.non_tensor_batch.values():
            return len(array) if np.ndim(array) else 0
        return 0

    # ---- make and convert ------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | TensorDict | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """A batch of tensors with equally many rows, and of arrays or lists.

        Lists in `non_tensors` are replaced there by object arrays. `num_batch_dims` can only be 1;
        `fold_batch_dim` gathers the rows of groups.
        """
        if num_batch_dims != 1:
            raise BatchError(f"num_batch_dims must be 1, got {num_batch_dims}: a row is one dim")
        columns: dict[str, Any] = {} if tensors is None else dict(tensors)
        arrays = {} if non_tensors is None else non_tensors
        meta_info = {} if meta_info is None else meta_info
        batch_size = common_rows(columns)
        replace_lists_by_arrays(arrays)
        if auto_padding:
            meta_info[DataProtoConfig.auto_padding_key] = True
        batch: Any = TensorDict(columns, batch_size=batch_size) if columns else None
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, Tensor | np.ndarray],
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """A batch of the tensors and arrays in one dictionary."""
        tensors, arrays = sort_single_dict(data)
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls,
        tensor_dict: TensorDict | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> Self:
        """Stacks of objects become arrays, and batch-wide values meta_info."""
        tensors, arrays, shared = sort_tensordict(
            TensorDict() if tensor_dict is None else tensor_dict
        )
        return cls.from_dict(
            tensors, arrays, union_meta_info(meta_info or {}, shared), num_batch_dims
        )

    def to_tensordict(self) -> TensorDict:
        """Arrays become stacks of objects, and meta_info batch-wide values."""
        entries: dict[str, Any] = self._columns()
        check_distinct(entries, self.non_tensor_batch, self.meta_info)
        for key, array in self.non_tensor_batch.items():
            entries[key] = non_tensor_stack(array.tolist())
        for key, value in self.meta_info.items():
            entries[key] = NonTensorData(value)
        return TensorDict(entries, batch_size=[len(self)] if self._has_rows() else [])

    def to(self, device: torch.device | str | int) -> Self:
        """Move the tensors of this batch; returns itself."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # ---- rows ------------------------------------------------------------------------------------

    def __getitem__(self, item: Any) -> Any:
        """A row for an integer; a new batch for a slice, row numbers or a mask."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer):
            return self._row(int(item))
        if isinstance(item, list | np.ndarray | Tensor):
            return self.select_idxs(item)
        raise TypeError(
            f"a batch is indexed by an integer, a slice, a list, an array or a tensor, "
            f"not by {type(item).__name__}"
        )

    def _row(self, number: int) -> DataProtoItem:
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} is out of range: there are {len(self)} rows")
        number %= len(self)
        columns = {key: column[number] for key, column in self._columns().items()}
        batch: Any = None if self.batch is None else TensorDict(columns, batch_size=[])
        arrays = {key: array[number] for key, array in self.non_tensor_batch.items()}
        return DataProtoItem(batch, arrays, self.meta_info)

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> Self:
        window = slice(start, end, step)
        rows = range(len(self))[window]
        arrays = {key: array[window] for key, array in self.non_tensor_batch.items()}
        return self._like(slice_rows(self._columns(), rows), arrays, len(rows))

    def select_idxs(self, idxs: RowIndex) -> Self:
        """Copy rows, chosen by number (negative ones count from the end) or by a bool mask."""
        index = as_row_index(idxs, len(self))
        numbers = index.cpu().numpy()
        arrays = {key: array[numbers] for key, array in self.non_tensor_batch.items()}
        return self._like(take_rows(self._columns(), index), arrays, len(index))

    def reorder(self, indices: RowIndex) -> None:
        """Replace the rows of this batch by its rows `indices`."""
        self._become(self.select_idxs(indices))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Every row several times: AABB when interleaved, ABAB otherwise."""
        if repeat_times < 0:
            raise BatchError(f"repeat_times must not be negative, got {repeat_times}")
        columns = repeat_rows(
            self._columns(), repeat_times, num_rows=len(self), interleave=interleave
        )
        order = np.arange(len(self))
        order = order.repeat(repeat_times) if interleave else np.tile(order, repeat_times)
        arrays = {key: array[order] for key, array in self.non_tensor_batch.items()}
        return self._like(columns, arrays, len(order))

    def sample_level_repeat(self, repeat_times: Sequence[int] | Tensor | np.ndarray) -> Self:
        """Row i `repeat_times[i]` times."""
        counts = torch.as_tensor(repeat_times).cpu()
        is_fractional = counts.is_floating_point() and counts.numel() > 0
        if counts.shape != (len(self),) or is_fractional or (counts < 0).any():
            raise BatchError(
                f"repeat_times needs a count of at least 0 for each of the {len(self)} rows, "
                f"got {counts.tolist()}"
            )
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(counts.long()))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Rows that hold groups become rows of their own.

        Columns in `split_keys` go from (B, n_split * k) to (B * n_split, k); rows of all others are
        repeated.
        """
        return unfold_columns(self, n_split, split_keys or ())

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append copies of the last row, or of the "first" one, to this batch."""
        if padding_candidate not in ("", "first", "last") or padding_size < 0:
            raise BatchError(
                f"padding appends a number of copies of the 'first' or 'last' row, "
                f"got {padding_size=}, {padding_candidate=}"
            )
        row = 0 if padding_candidate == "first" else -1
        self._become(self.select_idxs([*range(len(self)), *[row] * padding_size]))

    def is_padding_enabled(self) -> bool:
        """Whether `chunk` may cut this batch unevenly."""
        own = self.meta_info.get(DataProtoConfig.auto_padding_key, False)
        return bool(own) or DataProtoConfig.auto_padding

    # ---- cut and join ----------------------------------------------------------------------------

    def chunk(self, chunks: int) -> list[Self]:
        """Cut into `chunks` batches: equal ones, unless auto-padding permits unequal ones.

        Then 10 rows in 4 chunks are 3, 3, 3, 1, and 3, 3, 2, 2 if there are no tensors.
        """
        if chunks < 1 or (len(self) % chunks and not self.is_padding_enabled()):
            raise BatchError(
                f"a batch of {len(self)} rows cannot be cut into {chunks} equal chunks; "
                f"pad it with pad_dataproto_to_divisor, or enable auto-padding"
            )
        if self.batch is None:
            sizes = [len(part) for part in np.array_split(np.arange(len(self)), chunks)]
        else:
            sizes = chunk_sizes(len(self), chunks)
        batches: list[Any] = (
            [None] * chunks if self.batch is None else split_rows(self.batch, sizes)
        )
        bounds = np.cumsum(sizes)[:-1]
        arrays = {key: np.split(array, bounds) for key, array in self.non_tensor_batch.items()}
        return [
            type(self)(batch, {key: parts[i] for key, parts in arrays.items()}, self.meta_info)
            for i, batch in enumerate(batches)
        ]

    def split(self, split_size: int) -> list[Self]:
        """Cut into batches of `split_size` rows; the last one may be short."""
        if split_size < 1:
            raise BatchError(f"split_size must be at least 1, got {split_size}")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence["DataProto"]) -> "DataProto":
        """The rows of all parts below each other, in the class of the first part.

        `metrics` in meta_info are collected into a dictionary of lists; other keys must agree.
        """
        if not data:
            raise BatchError("cannot concatenate an empty list of batches")
        if len({part.batch is None for part in data}) > 1:
            raise BatchError("cannot concatenate batches with tensors and batches without")
        whole = data[0]._like(
            columns=concat_rows([part._columns() for part in data]),
            arrays=concat_arrays([part.non_tensor_batch for part in data]),
            num_rows=sum(len(part) for part in data),
        )
        whole.meta_info = concat_meta_info(part.meta_info for part in data)
        return whole

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Mini-batches for `epochs` passes over the rows.

        `dataloader_kwargs={"shuffle": True}` shuffles, and a seed makes the sequence repeatable.
        """
        return iterate_minibatches(
            self.select_idxs,
            num_rows=len(self),
            mini_batch_size=mini_batch_size,
            epochs=epochs,
            seed=seed,
            dataloader_kwargs=dataloader_kwargs,
        )

    # ---- columns ---------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """A batch of some columns, which shares the tensors; None keeps all of a kind.

        A missing tensor is a KeyError, other missing keys are ignored. `deepcopy` copies the arrays
        and meta_info, not the tensors.
        """
        batch: Any = select_columns(self.batch, batch_keys)
        arrays = pick(self.non_tensor_batch, non_tensor_batch_keys)
        meta_info = (
            self.meta_info if meta_info_keys is None else pick(self.meta_info, meta_info_keys)
        )
        if deepcopy:
            arrays, meta_info = copy.deepcopy(arrays), copy.deepcopy(meta_info)
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> Self:
        """Move some columns out of this batch into a new one; None moves nothing of a kind."""
        columns, arrays, meta_info = (
            list(keys or ()) for keys in (batch_keys, non_tensor_batch_keys, meta_info_keys)
        )
        check_present(columns, self._columns(), "pop")
        check_present(arrays, self.non_tensor_batch, "pop")
        check_present(meta_info, self.meta_info, "pop")
        return self.from_dict(
            tensors={key: self.batch.pop(key) for key in columns},
            non_tensors={key: self.non_tensor_batch.pop(key) for key in arrays},
            meta_info={key: self.meta_info.pop(key) for key in meta_info},
        )

    def rename(
        self, old_keys: str | list[str] | None = None, new_keys: str | list[str] | None = None
    ) -> Self:
        """Rename tensor columns of this batch; returns itself."""
        names = renaming(old_keys, new_keys, present=self._columns())
        moved = {new: self.batch.pop(old) for old, new in names.items()}
        for name, column in moved.items():
            self.batch.set(name, column)
        return self

    def union(self, other: "DataProto") -> Self:
        """Add the columns and meta_info of `other` to this batch; returns itself.

        What both have must be equal; on a conflict this batch is left as it was.
        """
        if self._has_rows() and other._has_rows() and len(self) != len(other):
            raise BatchError(f"cannot unite batches of {len(self)} and {len(other)} rows")
        arrays = union_numpy_dict(dict(self.non_tensor_batch), other.non_tensor_batch)
        meta_info = union_meta_info(self.meta_info, other.meta_info)
        if other.batch is not None:
            mine = TensorDict(batch_size=[len(other)]) if self.batch is None else self.batch
            self.batch = union_tensor_dict(mine, other.batch)
        self.non_tensor_batch, self.meta_info = arrays, meta_info
        return self

    # ---- store, send, show -----------------------------------------------------------------------

    def save_to_disk(self, filepath: str | PathLike[str]) -> None:
        """Write one safetensors file; a value that is not plain data is refused by name."""
        write_fields(Fields(self.batch, self.non_tensor_batch, self.meta_info), Path(filepath))

    @staticmethod
    def load_from_disk(filepath: str | PathLike[str]) -> "DataProto":
        """Read what `save_to_disk` has written; anything else is a ValueError."""
        batch, arrays, meta_info = read_fields(Path(filepath))
        return DataProto(batch, arrays, meta_info)  # pyright: ignore[reportArgumentType]

    def __getstate__(self) -> dict[str, Any]:
        batch = None if self.batch is None else serialize_tensordict(self.batch)
        return {**self.__dict__, "batch": batch}

    def __setstate__(self, state: dict[str, Any]) -> None:
        batch = state["batch"]
        self.__dict__.update(state, batch=None if batch is None else deserialize_tensordict(batch))

    def print_size(self, prefix: str = "") -> None:
        """Print how much memory the columns take."""
        size = describe_size(self._columns(), self.non_tensor_batch)
        sys.stdout.write(f"{prefix}, {size}\n" if prefix else f"{size}\n")

    def get_data_info(self) -> str:
        """The columns, one per line, as `name: shape (dtype) device`."""
        return describe_columns(self._columns(), self.non_tensor_batch, self.meta_info)

    # ---- building blocks -------------------------------------------------------------------------

    def _has_rows(self) -> bool:
        return self.batch is not None or bool(self.non_tensor_batch)

    def _columns(self) -> dict[str, Column]:
        return {} if self.batch is None else dict(self.batch.items())

    def _like(
        self, columns: Mapping[str, Column], arrays: dict[str, np.ndarray], num_rows: int
    ) -> Self:
        """A batch with these columns; without tensors if this one has none."""
        batch: Any = self.batch
        if batch is not None:
            batch = TensorDict(dict(columns), batch_size=[num_rows], device=batch.device)
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=self.meta_info)

    def _become(self, other: "DataProto") -> None:
        self.batch, self.non_tensor_batch = other.batch, other.non_tensor_batch
