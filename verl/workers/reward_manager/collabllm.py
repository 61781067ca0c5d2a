"""The reward manager of CollabLLM (arXiv:2502.00640): weighted metrics of simulated conversations.

    r = mean over the conversations of sum_m weight_m metric_m(conversation)

`reward_kwargs.metric_weights` has the metrics and their weights:

    accuracy       the reward function on the model's last message
    token_amount   tokens of all messages of the model
    interactivity  a judge (0 to 1) behind an OpenAI endpoint: `reward_kwargs.judge` has its `url`,
                   `model` and the other options of the reward manager `judge`
    any other      a function of one's own, `reward_kwargs.metrics.<name>`: "file.py:function",
                   called with `data_source`, `messages`, `ground_truth` and `extra_info`

A metric that raises or gives no number is a fault of grading: never 0.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from verl.protocol.trajectory import Grade, Score, Trajectory
from verl.utils.import_utils import load_extern_object
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.grader import DEFAULT_TIMEOUT_SECONDS, as_grade
from verl.workers.reward_manager.judge import judge_of
from verl.workers.reward_manager.managers import FunctionManager, require_positive

Messages = list[dict[str, Any]]

INTERACTIVITY = (
    "You grade how well an assistant works with a person. `candidate` is their conversation. "
    "Decide how far the assistant asks what it needs to know, builds on what the person says and "
    "moves them towards what they want; 0 is not at all, 1 could not be better."
)


class CollabRewardManager(FunctionManager):
    """`reward_manager.name=collabllm`, for responses of the loop `collabllm_agent`."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        *,
        metric_weights: Mapping[str, float] | None = None,
        metrics: Mapping[str, str] | None = None,
        judge: Mapping[str, Any] | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        max_concurrent: int = 16,
        **kwargs: Any,
    ) -> None:
        function = compute_score or default_compute_score
        super().__init__(tokenizer, num_examine, function, reward_fn_key, **kwargs)
        require_positive(timeout_seconds=timeout_seconds, max_concurrent=max_concurrent)
        self.compute_score = function
        self.timeout_seconds, self.max_concurrent = timeout_seconds, max_concurrent
        self.weights = {name: float(weight) for name, weight in (metric_weights or {}).items()}
        self.judge = None
        if judge is not None:
            self.judge = judge_of({"instructions": INTERACTIVITY, **judge})
        known = {"accuracy": self._accuracy, "token_amount": self._token_amount}
        if self.judge is not None:
            known["interactivity"] = self._interactivity
        own = {name: _own_metric(place) for name, place in (metrics or {}).items()}
        self.metrics: dict[str, Callable[..., Any]] = {**known, **own}
        unknown = sorted(set(self.weights) - set(self.metrics))
        if unknown or not self.weights:
            raise ValueError(
                f"reward_kwargs.metric_weights of the reward manager collabllm is {self.weights}; "
                f"it needs weights, and {unknown} are no metrics here. Known: "
                f"{', '.join(sorted(self.metrics))}; interactivity needs reward_kwargs.judge with "
                "url and model, one of your own reward_kwargs.metrics.<name>=file.py:function"
            )

    async def grade(self, trajectory: Trajectory) -> Grade:
        self.prepare([trajectory])
        arguments = self.call_arguments(trajectory)
        about = {key: arguments[key] for key in ("data_source", "ground_truth", "extra_info")}
        conversations: list[Messages] | None = trajectory.extra_fields.get("conversations")
        if not conversations:
            raise ValueError(
                "the response has no column `conversations`; the reward manager collabllm grades "
                "those of the agent loop collabllm_agent (rollout.agent.default_agent_loop)"
            )
        means: dict[str, float] = {}
        for name in self.weights:
            values: list[float] = []
            for messages in conversations:
                found = self.metrics[name](messages=messages, **about)
                grade = as_grade(await found if inspect.isawaitable(found) else found)
                if not isinstance(grade, Score):
                    return grade
                values.append(grade.value)
            means[name] = fmean(values)
        total = sum(weight * means[name] for name, weight in self.weights.items())
        return Score(total, {**means, "acc": means.get("accuracy", total)})

    async def _accuracy(
        self, *, messages: Messages, data_source: str, ground_truth: Any, extra_info: Any
    ) -> Any:
        said = [str(m["content"]) for m in messages if m["role"] == "assistant"][-1]
        if inspect.iscoroutinefunction(self.compute_score):
            return await self.compute_score(data_source, said, ground_truth, extra_info)
        return await asyncio.to_thread(
            self.compute_score, data_source, said, ground_truth, extra_info
        )

    def _token_amount(self, *, messages: Messages, **about: Any) -> float:
        said = [str(m["content"]) for m in messages if m["role"] == "assistant"]
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in said]
        return float(sum(map(len, ids)))

    async def _interactivity(self, *, messages: Messages, data_source: str, **about: Any) -> Any:
        assert self.judge is not None
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return await self.judge(data_source, "\n".join(lines), None, {"question": None})


def _own_metric(place: str) -> Callable[..., Any]:
    path, found, name = place.rpartition(":")
    if not found:
        raise ValueError(f"a metric of collabllm is {place!r}; it must be 'file.py:function'")
    return load_extern_object(path, name)
