"""`Geo3kTool`: hand in an answer to a question of geometry and hear whether it is right."""

from verl.tools.gsm8k_tool import AnswerTool, answer_schema
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.reward_score import geo3k


class Geo3kTool(AnswerTool):
    """Scores a mathematical expression against the answer of a Geometry3K row: 1 or 0."""

    options = ()

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return vars(self).get("tool_schema") or answer_schema(
            "calc_geo3k_reward",
            "Compute the score of an answer to the question: 1.0 if it is right, else 0.0.",
            "The final answer, without units.",
        )

    def scored(self, answer: str, ground_truth: str) -> float:
        score = geo3k.compute_score(answer, ground_truth, use_boxed=False, format_score=0.0)
        if score is None:
            raise ValueError(f"the answer {answer!r:.100} cannot be graded")
        return float(score)
