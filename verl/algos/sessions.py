"""Sessions: what counts as one sample where a conversation became several rows.

The column `session_uid` is equal for the rows of a session; a batch without it has one row per
session, and nothing here does anything to it.
"""

import numpy as np

from verl.protocol import DataProto
from verl.protocol.padded import SESSION_UID


def session_ends(batch: DataProto) -> np.ndarray | None:
    """The last row of each session, which bears its reward; None where every row is a session."""
    names = batch.non_tensor_batch.get(SESSION_UID)
    if names is None:
        return None
    return np.array(sorted({name: row for row, name in enumerate(names)}.values()))


def one_row_per_session(batch: DataProto) -> DataProto:
    """The last row of each session."""
    ends = session_ends(batch)
    return batch if ends is None else batch.select_idxs(ends)
