"""A response as a reward function sees it: text, where it belongs, and what is known besides."""

import copy
from dataclasses import dataclass
from typing import Any

from verl.protocol import DataProto
from verl.utils.torch_functional import kept_tokens


@dataclass(frozen=True)
class Response:
    """One row of a batch."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]
    num_tokens: int

    def call_arguments(self) -> dict[str, Any]:
        """What `compute_score` is called with: copies, so that it cannot change the batch."""
        return {
            "data_source": self.data_source,
            "solution_str": self.solution_str,
            "ground_truth": copy.deepcopy(self.ground_truth),
            "extra_info": copy.deepcopy(self.extra_info),
        }


def responses_of(data: DataProto, tokenizer: Any, reward_fn_key: str) -> list[Response]:
    """The rows of a batch, decoded without padding and special tokens."""
    tokens, arrays = data.batch["responses"], data.non_tensor_batch
    if reward_fn_key not in arrays:
        raise ValueError(
            f"the batch has no column {reward_fn_key!r}, which data.reward_fn_key names; it has: "
            f"{', '.join(sorted(arrays))}"
        )
    ids = kept_tokens(tokens, data.batch["attention_mask"][:, -tokens.shape[1] :])
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    truths = arrays.get("reward_model", [{"ground_truth": None}] * len(data))
    return [
        Response(
            data_source=arrays[reward_fn_key][row],
            solution_str=texts[row],
            ground_truth=truths[row]["ground_truth"],
            extra_info=extra_info(arrays, row),
            num_tokens=len(ids[row]),
        )
        for row in range(len(data))
    ]


def extra_info(arrays: dict[str, Any], row: int) -> dict[str, Any]:
    """The row's own `extra_info`, and what the agent loop knows about the conversation."""
    found = dict(arrays["extra_info"][row] or {}) if "extra_info" in arrays else {}
    if "__num_turns__" in arrays:
        found["num_turns"] = int(arrays["__num_turns__"][row])
    found["rollout_reward_scores"] = (
        arrays["reward_scores"][row] if "reward_scores" in arrays else {}
    )
    if "tool_extra_fields" in arrays:
        found |= arrays["tool_extra_fields"][row] or {}
    return found
