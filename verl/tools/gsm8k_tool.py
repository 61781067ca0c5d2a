"""`Gsm8kTool`: the model hands in an answer during its solution and hears whether it is right.

The answer handed in last decides `calc_reward`. A call that does not improve on the last one costs
a little, so that guessing on is no strategy.
"""

import asyncio
import uuid
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score import gsm8k

NO_PROGRESS = -0.05
"""Reward of a call that does not improve the answer."""


def answer_schema(name: str, description: str, answer: str) -> OpenAIFunctionToolSchema:
    """A function with one parameter, the answer."""
    parameters = {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": answer}},
        "required": ["answer"],
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


class AnswerTool(BaseTool):
    """Answers of trajectories and their scores; subclasses say how an answer is scored."""

    def __init__(self, config: Any, tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """`ground_truth` comes from the row: `tools_kwargs.{name}.create_kwargs.ground_truth`."""
        instance_id = instance_id or uuid.uuid4().hex
        if ground_truth is None:
            ground_truth = (kwargs.get("create_kwargs") or {}).get("ground_truth")
        if ground_truth is None:
            raise ValueError(
                f"the row has no ground truth for tool {self.name!r}; it belongs in "
                f"extra_info.tools_kwargs.{self.name}.create_kwargs.ground_truth"
            )
        self._instance_dict[instance_id] = {"answer": "", "truth": str(ground_truth), "score": 0.0}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        held = self._instance_dict[instance_id]
        answer = self.written(str(parameters.get("answer", "")))
        score = await asyncio.to_thread(self.scored, answer, held["truth"])
        reward = 0.0 if score > held["score"] else NO_PROGRESS
        held |= {"answer": answer, "score": score}
        text = f"Current parsed answer={held['answer']!r} reward={score}"
        return ToolResponse(text=text), reward, {"score": score}

    def written(self, answer: str) -> str:
        """The answer in the form that the scorer reads."""
        return answer

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return self._instance_dict[instance_id]["score"]

    def scored(self, answer: str, ground_truth: str) -> float:
        """The score of an answer; it may take time, and raises where there is no verdict."""
        raise NotImplementedError

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._instance_dict.pop(instance_id, None)


class Gsm8kTool(AnswerTool):
    """Scores a number against the answer of a GSM8K row: 1 or 0."""

    options = ()

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return vars(self).get("tool_schema") or answer_schema(
            "calc_gsm8k_reward",
            "Compute the score of an answer to the question: 1.0 if it is right, else 0.0.",
            "The final answer, a number.",
        )

    def written(self, answer: str) -> str:
        return answer if answer.startswith("#### ") else f"#### {answer}"

    def scored(self, answer: str, ground_truth: str) -> float:
        return float(gsm8k.compute_score(answer, ground_truth, method="flexible"))
