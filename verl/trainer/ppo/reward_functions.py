"""How a user's reward function is called.

There are two kinds. A per-sample function scores one response and is called with keywords:

    compute_score(data_source, solution_str, ground_truth, extra_info=None) -> number | dict

A whole-batch function takes the batch and returns the rewards, (B,) or (B, T):

    compute_reward(data: DataProto) -> Tensor

The signature decides. A function is called with the whole batch if a parameter is annotated
`DataProto`, or if exactly one parameter has no default and its name is none that a per-sample call
passes; every other function is called per sample.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.workers.reward_manager.abstract import scores_on_last_token

_PER_SAMPLE = {"data_source", "solution_str", "ground_truth", "extra_info"}
_PER_SAMPLE_LISTS = {"data_sources", "solution_strs", "ground_truths", "extra_infos"}
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def takes_whole_batch(function: Callable[..., Any]) -> tuple[bool, str]:
    """Whether a function is called with the batch, and the reason in words."""
    parameters = list(inspect.signature(function).parameters.values())
    for parameter in parameters:
        if _is_data_proto(parameter.annotation):
            return True, f"its parameter {parameter.name!r} is a DataProto"
    required = [
        p.name for p in parameters if p.default is Parameter.empty and p.kind not in _VARIADIC
    ]
    if len(required) == 1 and required[0] not in _PER_SAMPLE | _PER_SAMPLE_LISTS:
        return True, f"its only required parameter is {required[0]!r}"
    return False, f"its required parameters are {required}"


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


def is_async(function: Callable[..., Any]) -> bool:
    """Also for an object whose `__call__` is async."""
    return inspect.iscoroutinefunction(function) or (
        not inspect.isroutine(function) and inspect.iscoroutinefunction(type(function).__call__)
    )


class WholeBatchReward:
    """Lets a `(DataProto) -> Tensor` function stand where a reward manager is expected."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if is_async(function):
            raise ValueError(
                f"reward function {name_of(function)} takes the whole batch and is async; "
                "only per-sample functions may be async"
            )
        self.function = function

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        rewards = self._rewards(data)
        if not return_dict:
            return rewards
        return {"reward_tensor": rewards, "reward_extra_info": {}}

    def _rewards(self, data: DataProto) -> Tensor:
        rewards = self.function(data)
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


def name_of(function: Callable[..., Any]) -> str:
    return function.__qualname__ if inspect.isroutine(function) else type(function).__qualname__


def _is_data_proto(annotation: Any) -> bool:
    if isinstance(annotation, str):  # `from __future__ import annotations`
        return annotation.rpartition(".")[2] == "DataProto"
    return isinstance(annotation, type) and issubclass(annotation, DataProto)
