"""`PromptRow`: a row that can also be asked for the columns that datasets used to make.

Token ids are made where they are sent to a model. Code that still expects them in a row, such as
`row["input_ids"]`, gets them here, computed when it asks; a row that nobody asks costs nothing, and
they are not part of a batch.
"""

from collections.abc import Callable
from typing import Any

import torch

Column = Callable[[], Any]


class PromptRow(dict[str, Any]):
    """A dictionary with further entries, `offered`, that are computed when they are read."""

    def __init__(self, columns: dict[str, Any], offered: dict[str, Column]) -> None:
        super().__init__(columns)
        self.offered = offered

    def __missing__(self, name: str) -> Any:
        if name not in self.offered:
            raise KeyError(name)
        self[name] = value = self.offered[name]()
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        """Only what is there travels to other processes."""
        return dict, (dict(self),)


def padded_prompt(ids: list[int], length: int, pad_token_id: int) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask` and `position_ids`, (length,) each, padded on the left."""
    padding = length - len(ids)
    return {
        "input_ids": torch.tensor([pad_token_id] * padding + ids),
        "attention_mask": torch.tensor([0] * padding + [1] * len(ids)),
        "position_ids": torch.tensor([0] * padding + list(range(len(ids)))),
    }
