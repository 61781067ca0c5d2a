"""The tokens of padded rows without their padding."""

import numpy as np
from torch import Tensor


def kept_tokens(ids: Tensor, mask: Tensor) -> list[np.ndarray]:
    """For each row of `ids` (B, T) the entries where `mask` is set.

    All rows are taken at once, which is several times as fast as one after the other. Tokenizers
    decode arrays faster than lists, whose entries they look at one by one.
    """
    is_kept = mask.bool()
    ends = np.cumsum(is_kept.sum(1).tolist(), dtype=np.int64).tolist()
    tokens = ids[is_kept].cpu().numpy()
    return [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]
