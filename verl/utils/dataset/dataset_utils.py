"""How rows of supervised data become a batch: padded, or each at its own length."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor


class DatasetPadMode(str, Enum):
    """Where rows are padded."""

    RIGHT = "right"
    LEFT_RIGHT = "left_right"
    """Prompts on the left, responses on the right."""

    NO_PADDING = "no_padding"


class SFTTensorCollator:
    """Columns from rows. Padded rows are stacked; without padding a column is a jagged tensor.

    What is no tensor becomes an array of objects; a row that lacks it holds None.
    """

    def __init__(self, pad_mode: DatasetPadMode | str = DatasetPadMode.LEFT_RIGHT) -> None:
        self.pad_mode = DatasetPadMode(pad_mode)

    def __call__(self, batch: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        names = dict.fromkeys(name for row in batch for name in row)
        return {name: self._column(name, [row.get(name) for row in batch]) for name in names}

    def _column(self, name: str, values: list[Any]) -> Tensor | np.ndarray:
        tensors = [value for value in values if isinstance(value, Tensor)]
        if len(tensors) < len(values):
            column = np.empty(len(values), dtype=object)
            column[:] = values
            return column
        if self.pad_mode is DatasetPadMode.NO_PADDING:
            return torch.nested.nested_tensor(tensors, layout=torch.jagged)
        if len({tensor.shape for tensor in tensors}) > 1:
            shapes = sorted({tuple(tensor.shape) for tensor in tensors})
            raise ValueError(
                f"rows of {name!r} have the shapes {shapes}; with pad_mode={self.pad_mode.value} "
                "they must be equal. Pad them in the dataset, or use pad_mode=no_padding"
            )
        return torch.stack(tensors)
