"""A teacher who says whether the answer to a word problem is right, and asks again."""

from collections.abc import Sequence
from typing import Any

from verl.interactions.base import BaseInteraction, Reply
from verl.utils.reward_score import gsm8k

CORRECT = "Your response is correct!"
INCORRECT = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kInteraction(BaseInteraction):
    """The row's `interaction_kwargs` have `ground_truth`; the score of a turn is 1 or 0."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        if ground_truth is None:
            raise ValueError(
                "interaction_kwargs of the row have no ground_truth, which gsm8k compares with"
            )
        instance_id = await super().start_interaction(instance_id)
        self._instance_dict[instance_id] = {
            "response": "",
            "ground_truth": ground_truth,
            "reward": 0.0,
        }
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: Sequence[dict[str, Any]], **kwargs: Any
    ) -> Reply:
        spoken = [m["content"] for m in messages if m["role"] == "assistant"]
        instance = self._instance_dict[instance_id]
        instance["response"] = spoken[-1] if spoken else ""
        score = instance["reward"] = await self.calculate_score(instance_id)
        is_right = score == 1.0
        return is_right, CORRECT if is_right else INCORRECT, score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        instance = self._instance_dict[instance_id]
        return float(
            gsm8k.compute_score(
                instance["response"] or "",
                instance["ground_truth"],
                method="strict",
                format_score=0.0,
                score=1.0,
            )
        )

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self._instance_dict[instance_id]
