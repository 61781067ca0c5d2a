"""What the device knows about each running sequence, one row per response slot.

The columns are allocated once and keep their addresses; a step reads and writes the first B rows.
The host fills a row when a sequence is admitted and reads the table once per engine step, not per
token: in between, `advance` decides on the tensors themselves which rows have come to their end.

Tensors go to the device in one copy from pinned memory. A copy from ordinary memory would make the
host wait until the device has done all that came before; torch keeps pinned memory until then.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Size, Tensor

from verl.utils.media import rope_delta
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.native.sequence import Sample

NO_TOKEN = -1
ALIGNMENT = 16
"""Bytes at whose multiples tensors begin."""

ColumnsT = TypeVar("ColumnsT", bound="Columns")


@dataclass(frozen=True, eq=False)
class Columns:
    """Fields are tensors, or Columns themselves, all of the same length."""

    def __getitem__(self: ColumnsT, rows: Any) -> ColumnsT:
        """The same columns for some rows; for a slice they are views of these."""
        return type(self)(**{name: column[rows] for name, column in vars(self).items()})

    def __setitem__(self: ColumnsT, rows: Any, other: ColumnsT) -> None:
        for name, column in vars(self).items():
            column[rows] = vars(other)[name]

    def zeros(self: ColumnsT, num_rows: int) -> ColumnsT:
        """Columns of these kinds with `num_rows` rows of zeros."""
        return type(self)(
            **{
                name: column.zeros(num_rows)
                if isinstance(column, Columns)
                else column.new_zeros(num_rows, *column.shape[1:])
                for name, column in vars(self).items()
            }
        )

    def to(self: ColumnsT, device: torch.device) -> ColumnsT:
        """These columns, which are in ordinary memory, on `device`."""
        return self._with(iter(in_one_copy(list(self._tensors()), device)))

    def _tensors(self) -> Iterator[Tensor]:
        for column in vars(self).values():
            yield from column._tensors() if isinstance(column, Columns) else [column]

    def _with(self: ColumnsT, tensors: Iterator[Tensor]) -> ColumnsT:
        """Columns of the same names with other tensors, in the order of `_tensors`."""
        return type(self)(
            **{
                name: column._with(tensors) if isinstance(column, Columns) else next(tensors)
                for name, column in vars(self).items()
            }
        )


@dataclass(frozen=True, eq=False)
class RowSettings(Columns):
    """Sampling settings of B rows as tensors (B,)."""

    temperature: Tensor
    """1 where the row is greedy."""

    is_greedy: Tensor
    top_k: Tensor
    """0 where off."""

    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    renormalizes: Tensor
    """Whether log-probs are those of the filtered distribution."""

    seed: Tensor

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device
    ) -> "RowSettings":
        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            temperature=column([p.temperature or 1.0 for p in params], torch.float32),
            is_greedy=column([p.temperature == 0 for p in params], torch.bool),
            top_k=column([max(p.top_k, 0) for p in params], torch.long),
            top_p=column([p.top_p for p in params], torch.float64),
            min_p=column([p.min_p for p in params], torch.float32),
            repetition_penalty=column([p.repetition_penalty for p in params], torch.float32),
            renormalizes=column([p.renormalizes for p in params], torch.bool),
            seed=column(seeds, torch.long),
        )


@dataclass(frozen=True, eq=False)
class RowTable(Columns):
    """Tensors (B,), except `stop_ids`."""

    newest: Tensor
    """The newest token, whose keys and values are not in the cache yet."""

    num_tokens: Tensor
    """Response tokens so far, the newest included, and those that the prompt ends with."""

    token_limit: Tensor
    is_done: Tensor
    num_shared: Tensor
    """Prompt tokens in the prompt slot."""

    num_own_prompt: Tensor
    """Prompt tokens in the row's own slot, before its response; negative where the prompt ends with
    response tokens that are not in that slot."""

    rope_delta: Tensor
    """How much larger than its index the position of a token behind the prompt's images is."""

    prompt_slot: Tensor
    """Slots of the cache, which only kernels look up: elsewhere row i has slot i."""

    slot: Tensor
    stop_ids: Tensor
    """(B, most stop tokens), `NO_TOKEN` where a row has fewer."""

    settings: RowSettings

    @classmethod
    def of(cls, samples: Sequence[Sample], max_stop_ids: int) -> "RowTable":
        """The rows of samples that have just been given their slots, in ordinary memory."""
        groups = list(dict.fromkeys(sample.group for sample in samples))
        number = {group: i for i, group in enumerate(groups)}
        owner = np.array([number[sample.group] for sample in samples], dtype=np.int64)

        def column(values: Sequence[int]) -> Tensor:
            return torch.from_numpy(np.array(values, dtype=np.int64))

        def of_groups(values: Sequence[int]) -> Tensor:
            return torch.from_numpy(np.array(values, dtype=np.int64)[owner])

        stop_ids = np.full((len(groups), max_stop_ids), NO_TOKEN, dtype=np.int64)
        for row, group in zip(stop_ids, groups, strict=True):
            row[: len(group.stop_token_ids)] = group.stop_token_ids
        params = [group.request.params for group in groups]
        settings = RowSettings.of(params, [0] * len(params), torch.device("cpu"))
        return cls(
            newest=torch.zeros(len(samples), dtype=torch.long),
            num_tokens=column([sample.next_index for sample in samples]),
            token_limit=of_groups([g.token_limit + g.request.num_sampled for g in groups]),
            is_done=torch.zeros(len(samples), dtype=torch.bool),
            num_shared=of_groups([group.num_shared for group in groups]),
            rope_delta=of_groups([rope_delta(group.media) for group in groups]),
            prompt_slot=of_groups([group.slot for group in groups]),
            slot=column([sample.slot for sample in samples]),
            num_own_prompt=of_groups(
                [len(g.prompt_ids) - g.num_shared - g.request.num_sampled for g in groups]
            ),
            stop_ids=torch.from_numpy(stop_ids[owner]),
            settings=replace(
                settings[torch.from_numpy(owner)], seed=column([s.seed for s in samples])
            ),
        )

    @classmethod
    def empty(cls, num_rows: int, max_stop_ids: int, device: torch.device) -> "RowTable":
        return cls.of([], max_stop_ids).to(device).zeros(num_rows)

    @property
    def positions(self) -> Tensor:
        """Rotary position of each row's newest token."""
        # Rows of a graph that no sample has used yet would be at -1, which is nowhere.
        return (self.num_shared + self.slot_positions + self.rope_delta).clamp_min(0)

    @property
    def slot_positions(self) -> Tensor:
        """Position of each row's newest token in its own slot."""
        return self.num_own_prompt + self.num_tokens - 1

    def advance(self, tokens: Tensor) -> None:
        """Append `tokens` (B,) to the rows that are not done, and update `is_done`.

        A row that is done runs on with the others, but it stays where it is.
        """
        self.newest.copy_(tokens)
        self.num_tokens.add_(~self.is_done)
        is_stop = (tokens[:, None] == self.stop_ids).any(1)
        self.is_done.logical_or_(is_stop | (self.num_tokens >= self.token_limit))


class Record:
    """Tensors of fixed dtypes and shapes, packed into one buffer of bytes."""

    def __init__(self, fields: Sequence[tuple[torch.dtype, Size]]) -> None:
        self.fields = fields
        self.num_bytes = 0
        self._starts: list[int] = []
        for dtype, shape in fields:
            self._starts.append(self.num_bytes)
            size = shape.numel() * dtype.itemsize
            self.num_bytes += size + -size % ALIGNMENT

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors themselves; whoever writes to them writes to the buffer."""
        return [
            buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for start, (dtype, shape) in zip(self._starts, self.fields, strict=True)
        ]

    def on_host(self, device: torch.device) -> Tensor:
        """A new buffer whose copy to a GPU does not wait; its contents are undefined."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def in_one_copy(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same tensors, which are in ordinary memory, on `device`."""
    record = Record([(tensor.dtype, tensor.shape) for tensor in tensors])
    buffer = record.on_host(device)
    for view, tensor in zip(record.views(buffer), tensors, strict=True):
        view.copy_(tensor)
    return record.views(buffer.to(device, non_blocking=device.type == "cuda"))


ColumnsT = TypeVar("ColumnsT", bound="Columns")
