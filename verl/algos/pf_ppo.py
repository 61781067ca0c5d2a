"""Policy filtration (arXiv:2409.06957): train more often on responses whose scores are reliable.

A reward model is surest about the best and the worst responses. The batch is drawn anew from
itself, with replacement, with weights that favour those.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.algos.advantages.returns import require_finite

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
    repeatable; without one torch's global generator is used.
    """
    score = require_finite(data.batch["token_level_scores"], "token_level_scores").sum(-1)  # (B,)
    weights = reweight_weights(score, reweight_method, weight_pow)
    rows = torch.multinomial(weights, len(score), replacement=True, generator=generator)
    drawn = data.select_idxs(rows)
    drawn.meta_info = {
        key: _pick(value, rows) if isinstance(value, list) and len(value) == len(score) else value
        for key, value in data.meta_info.items()
    }
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
