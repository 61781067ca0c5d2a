"""Which tokens each row has seen, for repetition penalties: a large table, made on first use."""

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.utils.device import without_waiting
from verl.workers.rollout.native.scheduler import Move
from verl.workers.rollout.native.sequence import Sample


class SeenTokens:
    """(rows, V), True for tokens of a row's prompt and response; used where a penalty applies."""

    def __init__(self, num_rows: int, vocabulary: int, device: torch.device) -> None:
        self._shape = (num_rows, vocabulary)
        self._device = device
        self._table: Tensor | None = None

    def enter(self, samples: Sequence[Sample]) -> None:
        """Fill the rows of samples that have just been given their slots."""
        for sample in samples:
            if sample.group.request.params.repetition_penalty != 1:
                row = self._whole()[sample.slot]
                row.fill_(False)
                row[without_waiting(torch.tensor(sample.token_ids), self._device)] = True

    def rows(self, rows: slice) -> Tensor:
        """The part of the table for some rows; it may be written to."""
        return self._whole()[rows]

    def move(self, move: Move) -> None:
        if self._table is not None:
            self._table[move.target] = self._table[move.source]

    def _whole(self) -> Tensor:
        if self._table is None:
            self._table = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        return self._table
