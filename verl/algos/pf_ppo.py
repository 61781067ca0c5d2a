"""Policy filtration (arXiv:2409.06957): train more often on responses whose scores are reliable.

A reward model is surest about the best and the worst responses. The batch is drawn anew from
itself, with replacement, with weights that favour those.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verl.algos.advantages.returns import require_finite
from verl.algos.sessions import session_numbers, session_sums
from verl.protocol.padded import SESSION_UID

if TYPE_CHECKING:
    from verl.protocol import DataProto


def compute_pf_ppo_reweight_data(
    data: "DataProto",
    reweight_method: str = "pow",
    weight_pow: float = 2.0,
    *,
    generator: torch.Generator | None = None,
) -> "DataProto":
    """A batch of the same size, drawn from `data` with weights by `reweight_weights`.

    The score of a response is the sum of its `token_level_scores`. Rows of tensors, of arrays, and
    of lists in `meta_info` that have one entry per row move together. `generator` makes the draw
    repeatable; without one torch's global generator is used. Where sessions have several rows, they
    are what is drawn, as many as there are; one that is drawn twice counts as two.
    """
    require_finite(data.batch["token_level_scores"], "token_level_scores")
    score = session_sums(data.batch["token_level_scores"].sum(-1), data)  # (S,)
    weights = reweight_weights(score, reweight_method, weight_pow)
    rows = torch.multinomial(weights, len(score), replacement=True, generator=generator)
    numbers = session_numbers(data)
    draws: list[int] = []
    if numbers is not None:
        chosen = [(numbers == session).nonzero().flatten() for session in rows.tolist()]
        draws = [draw for draw, part in enumerate(chosen) for _ in part]
        rows = torch.cat(chosen)
    drawn = data.select_idxs(rows)
    drawn.meta_info = {
        key: _pick(value, rows) if isinstance(value, list) and len(value) == len(data) else value
        for key, value in data.meta_info.items()
    }
    if numbers is not None:
        # One that was drawn twice is two sessions.
        names = zip(drawn.non_tensor_batch[SESSION_UID], draws, strict=True)
        renamed = [f"{name}#{draw}" for name, draw in names]
        drawn.non_tensor_batch[SESSION_UID] = np.array(renamed, dtype=object)
    return drawn


def reweight_weights(score: Tensor, reweight_method: str, weight_pow: float = 2.0) -> Tensor:
    """How often a response with this score is drawn, relative to the others; (B,) -> (B,).

        pow         |s|^weight_pow
        max_min     1 for the largest and the smallest score of the batch, 0 between
        max_random  0.4 for the largest score, 0.1 for the others

    Where all weights come out as 0 (all scores are 0), all responses are drawn alike.
    """
    if reweight_method == "pow":
        weights = score.abs().pow(weight_pow)
    elif reweight_method == "max_min":
        weights = ((score == score.max()) | (score == score.min())).to(score.dtype)
    elif reweight_method == "max_random":
        weights = torch.where(score == score.max(), 0.4, 0.1).to(score.dtype)
    else:
        raise ValueError(
            f"algorithm.pf_ppo.reweight_method is {reweight_method!r}; "
            "it must be one of: pow, max_min, max_random"
        )
    return weights if weights.any() else torch.ones_like(weights)


def _pick(entries: list[Any], rows: Tensor) -> list[Any]:
    return [entries[row] for row in rows.tolist()]
