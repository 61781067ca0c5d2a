"""One row of a batch."""

from dataclasses import dataclass, field
from typing import Any

from tensordict import TensorDict


@dataclass(eq=False)
class DataProtoItem:
    """What `data[i]` gives: the same three fields as the batch, without the row dim.

    `meta_info` is the batch's own dictionary, not a copy.
    """

    # None when the batch has no tensors; typed for the many who know that it has.
    batch: TensorDict = None  # pyright: ignore[reportAssignmentType]
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
