"""What a reward manager is: called with a batch of responses, it returns a reward per token.

A score belongs to a whole response and stands on its last token; the other tokens hold 0. Scores
that are in the batch already (`rm_scores`, from a reward model or the agent loop) are not computed
again.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.protocol.trajectory import Grade, Score


class AbstractRewardManager(ABC):
    """`compute_score` scores one response; `reward_fn_key` is the column with its data source.

    The first `num_examine` responses of each data source are logged. Keyword arguments beyond these
    are a manager's own, from `reward_model.reward_kwargs`.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score
        self.reward_fn_key = reward_fn_key

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        """Rewards (B, T), or with `return_dict` a dictionary that holds them as `reward_tensor`
        and, as `reward_extra_info`, a list of B values per further thing that was reported."""

    def close(self) -> None:  # noqa: B027 (most managers start nothing)
        """End processes and connections of the manager's own; called when its run has ended."""


def precomputed_rewards(data: DataProto) -> dict[str, Any] | None:
    """What a manager returns for a batch that carries `rm_scores`; None for any other batch.

    The columns that `meta_info["reward_extra_keys"]` names are reported along, and what loops that
    graded their own trajectories put into the field `reward_extra_info`.
    """
    if data.batch is None or "rm_scores" not in data.batch.keys():  # noqa: SIM118
        return None
    extra_keys = data.meta_info.get("reward_extra_keys", [])
    extras = {key: list(data.non_tensor_batch[key]) for key in extra_keys}
    reported = [found or {} for found in data.non_tensor_batch.get("reward_extra_info", ())]
    for key in dict.fromkeys(key for found in reported for key in found):
        extras.setdefault(key, [found.get(key) for found in reported])
    return {"reward_tensor": data.batch["rm_scores"], "reward_extra_info": extras}


def scores_on_last_token(scores: Tensor, data: DataProto) -> Tensor:
    """Put each of the (B,) scores on the last token of its response; the result is (B, T).

    An empty response has no token to carry a score: its row stays 0.
    """
    num_positions = data.batch["responses"].shape[-1]
    lengths = data.batch["attention_mask"][:, -num_positions:].sum(-1)  # (B,)
    rewards = torch.zeros(len(scores), num_positions, dtype=torch.float32, device=scores.device)
    rows = torch.nonzero(lengths > 0).squeeze(-1)
    rewards[rows, lengths[rows] - 1] = scores[rows].to(torch.float32)
    return rewards


class UngradedResponses(RuntimeError):
    """Some responses have no score, and a tensor of rewards has no place for that."""


def required_rewards(data: DataProto, grades: Sequence[Grade | None]) -> dict[str, Any]:
    """`graded_rewards`, where every response must have a score."""
    ungraded = {row: grade for row, grade in enumerate(grades) if not isinstance(grade, Score)}
    if ungraded:
        row, first = next(iter(ungraded.items()))
        raise UngradedResponses(
            f"{len(ungraded)} of {len(grades)} responses have no score; row {row}: {first}"
        )
    return graded_rewards(data, grades)


def graded_rewards(data: DataProto, grades: Sequence[Grade | None]) -> dict[str, Any]:
    """`reward_tensor` (B, T), 0 where there is no score, and what graders reported besides."""
    scores = [g for g in grades if isinstance(g, Score)]
    per_token = [g.token_values for g in scores if g.token_values is not None]
    if len(per_token) == len(grades):
        rewards = torch.from_numpy(np.stack(per_token))
    else:
        values = torch.tensor([g.value if isinstance(g, Score) else 0.0 for g in grades])
        rewards = scores_on_last_token(values, data)
    extras = [g.extras if isinstance(g, Score) else {} for g in grades]
    names = dict.fromkeys(name for entry in extras for name in entry)
    return {
        "reward_tensor": rewards,
        "reward_extra_info": {name: [entry.get(name) for entry in extras] for name in names},
    }


def with_accuracy(data: DataProto, result: Tensor | dict[str, Any]) -> Tensor | dict[str, Any]:
    """The result of calling a manager; the scores also become the batch's column `acc`, (B,)."""
    rewards = result["reward_tensor"] if isinstance(result, dict) else result
    data.batch["acc"] = rewards.sum(-1)
    return result
