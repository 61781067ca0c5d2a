"""How a user's reward function is called.

There are two kinds. A per-sample function scores one response and is called with keywords:

    compute_score(data_source, solution_str, ground_truth, extra_info=None) -> number | dict

A whole-batch function takes the batch and returns the rewards, (B,) or (B, T):

    compute_reward(data: DataProto) -> Tensor

The signature decides. A function is called with the whole batch if a parameter is annotated
`DataProto`, or if exactly one parameter has no default and its name is none that a per-sample call
passes; every other function is called per sample. The manager `batch` calls it with lists instead:

    compute_score(data_sources, solution_strs, ground_truths, extra_infos) -> list
"""

import functools
import inspect
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.workers.reward_manager.abstract import scores_on_last_token
from verl.workers.reward_manager.adapters import name_of
from verl.workers.reward_manager.grader import is_async
from verl.workers.reward_manager.managers import DEFAULT_BATCH_SECONDS

_PER_SAMPLE = {"data_source", "solution_str", "ground_truth", "extra_info"}
_PER_SAMPLE_LISTS = {"data_sources", "solution_strs", "ground_truths", "extra_infos"}
_SERVED = {"reward_router_address", "reward_model_tokenizer"}
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def takes_whole_batch(
    function: Callable[..., Any], given: Collection[str] = ()
) -> tuple[bool, str]:
    """Whether a function is called with the batch, and the reason in words.

    `given` are parameters that `custom_reward_function.reward_kwargs` sets.
    """
    parameters = list(inspect.signature(function).parameters.values())
    for parameter in parameters:
        if _is_data_proto(parameter.annotation):
            return True, f"its parameter {parameter.name!r} is a DataProto"
    required = [
        p.name
        for p in parameters
        if p.default is Parameter.empty and p.kind not in _VARIADIC and p.name not in given
    ]
    if len(required) == 1 and required[0] not in _PER_SAMPLE | _PER_SAMPLE_LISTS | _SERVED:
        return True, f"its only required parameter is {required[0]!r}"
    return False, f"its required parameters are {required}"


def refuse_other_form(function: Callable[..., Any], *, takes_lists: bool) -> None:
    """Say that a function is for lists and the manager is not, or the other way round."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return
    names = {parameter.name for parameter in parameters}
    if takes_lists and not names & _PER_SAMPLE_LISTS:
        raise ValueError(
            f"reward_manager.name is batch, which calls the reward function with "
            f"{', '.join(sorted(_PER_SAMPLE_LISTS))}; {name_of(function)} takes "
            f"{', '.join(sorted(names))}: set reward_manager.name=naive, or "
            "custom_reward_function.path to a function of lists"
        )
    if not takes_lists and names & _PER_SAMPLE_LISTS:
        raise ValueError(
            f"reward function {name_of(function)} takes lists "
            f"({', '.join(sorted(names & _PER_SAMPLE_LISTS))}); set reward_manager.name=batch"
        )


def with_fixed_kwargs(function: Callable[..., Any], fixed: Mapping[str, Any]) -> Callable[..., Any]:
    """The same function, called with `fixed` too; they win over what a call passes.

    An async function stays async, and the signature stays that of the original.
    """
    if not fixed:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**kwargs, **fixed})

    @functools.wraps(function)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **{**kwargs, **fixed})

    return call_async if is_async(function) else call


class WholeBatchReward:
    """Lets a `(DataProto) -> Tensor` function stand where a reward manager is expected.

    It is called on a thread of its own and may take `timeout_seconds`.
    """

    def __init__(
        self, function: Callable[..., Any], *, timeout_seconds: float = DEFAULT_BATCH_SECONDS
    ) -> None:
        if is_async(function):
            raise ValueError(
                f"reward function {name_of(function)} takes the whole batch and is async; "
                "only per-sample functions may be async"
            )
        self.function = function
        self.timeout_seconds = timeout_seconds

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        rewards = self._rewards(data)
        if not return_dict:
            return rewards
        return {"reward_tensor": rewards, "reward_extra_info": {}}

    def _rewards(self, data: DataProto) -> Tensor:
        call = functools.partial(self.function, data)
        rewards = call_with_deadline(call, self.timeout_seconds, name_of(self.function))
        expected = data.batch["responses"].shape  # (B, T)
        if not isinstance(rewards, Tensor) or rewards.shape not in (expected, expected[:1]):
            got = tuple(rewards.shape) if isinstance(rewards, Tensor) else type(rewards).__name__
            raise ValueError(
                f"reward function {name_of(self.function)} returned {got}; it must return a tensor "
                f"of shape {tuple(expected[:1])}, a score per response, or {tuple(expected)}, a "
                "reward per token"
            )
        if rewards.ndim == 1:
            return scores_on_last_token(rewards, data)
        return rewards.to(torch.float32)


def call_with_deadline(call: Callable[[], Any], seconds: float, name: str) -> Any:
    """What `call` returns or raises, on a thread of its own; `TimeoutError` if it takes longer."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    if not wait([future], seconds).done:
        raise TimeoutError(f"{name} took longer than {seconds} s")
    return future.result(timeout=0)


def _is_data_proto(annotation: Any) -> bool:
    if isinstance(annotation, str):  # `from __future__ import annotations`
        return annotation.rpartition(".")[2] == "DataProto"
    return isinstance(annotation, type) and issubclass(annotation, DataProto)
