"""`JudgeRewardManager`: another language model grades every response.

`Judge` is an async reward function like any other: it may also be called from one's own. A verdict
is a score. An endpoint that does not answer is a fault, so the group is tried again and then set
aside. A judge that answers without a verdict, several times over, abstains. `judge_prompt` says how
a response is kept from grading itself.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from verl.protocol.trajectory import Abstain, Score, Trajectory
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.judge_client import JudgeClient, JudgeEndpoint
from verl.workers.reward_manager.judge_prompt import DEFAULT_INSTRUCTIONS, NoVerdict, Question
from verl.workers.reward_manager.managers import LIMIT_OPTIONS, RateLimitedRewardManager

ENDPOINT_OPTIONS = tuple(field.name for field in fields(JudgeEndpoint))


class Judge:
    """`await judge(data_source, solution_str, ground_truth, extra_info)` is a grade.

    The question is `extra_info["raw_prompt"]` or `extra_info["question"]`, the reference answer is
    `ground_truth`. `sampling` goes into every request, for example `max_tokens` or
    `response_format`. A judge that gives no verdict is asked `max_questions` times.
    """

    def __init__(
        self,
        endpoint: JudgeEndpoint,
        *,
        instructions: str = DEFAULT_INSTRUCTIONS,
        min_score: float = 0.0,
        max_score: float = 1.0,
        max_questions: int = 3,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        if not min_score < max_score:
            raise ValueError(f"the judge's min_score ({min_score}) must be below {max_score}")
        if max_questions < 1:
            raise ValueError(f"max_questions of the judge is {max_questions}; ask at least once")
        self.client = JudgeClient(endpoint)
        self.instructions = instructions
        self.min_score, self.max_score = min_score, max_score
        self.max_questions = max_questions
        self.sampling = {"temperature": 0.0, **(sampling or {})}

    async def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Score | Abstain:
        """The score with the judge's reason, or an abstention where it will not decide."""
        known = extra_info or {}
        question = Question(
            question=known.get("raw_prompt", known.get("question")),
            candidate=solution_str,
            reference=ground_truth,
            instructions=self.instructions,
            low=self.min_score,
            high=self.max_score,
        )
        reason = ""
        for number in range(1, self.max_questions + 1):
            asked = question.keyed()
            answer = await self.client.complete(asked.messages(), **self.sampling)
            try:
                verdict = asked.verdict(answer)
            except NoVerdict as error:
                reason = str(error)
                continue
            extras = {"judge_reason": verdict.reason, "judge_questions": number}
            return Score(verdict.score, extras)
        return Abstain(f"no verdict in {self.max_questions} answers of the judge; last: {reason}")


class JudgeRewardManager(RateLimitedRewardManager):
    """`reward_manager.name=judge`; `reward_model.reward_kwargs` has the options of `JudgeEndpoint`
    and `Judge`, and the limits are those of `rate_limited`: `reward_model.max_concurrent` questions
    at a time, `reward_model.timeout` seconds for one response with all its attempts."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        **options: Any,
    ) -> None:
        refuse_a_second_function(compute_score)
        missing = sorted({"url", "model"} - options.keys())
        if missing:
            raise ValueError(
                f"reward_manager.name=judge needs {' and '.join(missing)} in "
                "reward_model.reward_kwargs: +reward_model.reward_kwargs.url=http://... "
                "+reward_model.reward_kwargs.model=..."
            )
        limits = {name: options.pop(name) for name in LIMIT_OPTIONS if name in options}
        endpoint = {name: options.pop(name) for name in ENDPOINT_OPTIONS if name in options}
        judge = Judge(JudgeEndpoint(**endpoint), **options)
        super().__init__(tokenizer, num_examine, judge, reward_fn_key, **limits)

    def extra_info(self, trajectory: Trajectory, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The judge sees the prompt too."""
        info = super().extra_info(trajectory, columns)
        return {**info, "raw_prompt": columns["raw_prompt"]} if "raw_prompt" in columns else info


def refuse_a_second_function(compute_score: Callable[..., Any] | None) -> None:
    """The built-in function is what every manager is handed; any other was meant to be called."""
    function = compute_score.func if isinstance(compute_score, functools.partial) else compute_score
    if function is not None and function is not default_compute_score:
        raise ValueError(
            "reward_manager.name=judge asks a judge and would not call custom_reward_function; "
            "leave one of them out, or ask verl.workers.reward_manager.judge.Judge from the "
            "function"
        )
