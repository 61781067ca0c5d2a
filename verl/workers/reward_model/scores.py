"""The score of whole token sequences, read at the last token of each.

A value model says something at the token *before* every response token. A sequence therefore
becomes a row with one column more, whose token nobody looks at: what the model says before it, it
says at the last token of the sequence. Training a reward model and using one go through the same
rows, so any engine that has values can do both.
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.utils.model import compute_position_id_with_mask
from verl.workers.engine.base import BaseEngine, MicroBatching


def as_rows(sequences: Sequence[Sequence[int]]) -> TensorDict:
    """[padding, tokens, one column more] for the engine; its `values` (B, 1) are the scores."""
    empty = [row for row, tokens in enumerate(sequences) if not len(tokens)]
    if empty:
        raise ValueError(f"sequence {empty[0]} has no tokens; a score is read at the last one")
    B, L = len(sequences), max(map(len, sequences))
    ids = torch.zeros(B, L + 1, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(sequences):
        ids[row, L - len(tokens) : L] = torch.tensor(tokens)
        mask[row, L - len(tokens) :] = 1
    columns = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": compute_position_id_with_mask(mask),
        "responses": ids[:, L:],
    }
    return TensorDict(columns, batch_size=B)  # pyright: ignore[reportArgumentType]


def sequence_scores(
    engine: BaseEngine, sequences: Sequence[Sequence[int]], *, micro_batching: MicroBatching
) -> Tensor:
    """(B,) scores in fp32; they depend neither on the neighbours nor on the cut."""
    values = engine.infer_batch(as_rows(sequences), micro_batching=micro_batching)["values"]
    return values[:, 0]


def cut(tokens: list[int], max_length: int | None, truncation: str) -> list[int]:
    """At most `max_length` tokens; None sets no limit. `truncation` says where the others go."""
    if max_length is None or len(tokens) <= max_length:
        return tokens
    if truncation == "left":
        return tokens[-max_length:]
    if truncation == "right":
        return tokens[:max_length]
    raise ValueError(
        f"the reward model is given {len(tokens)} tokens; reward_model.max_length is {max_length} "
        "and reward_model.truncation is 'error': raise the limit, or cut with left or right"
    )
