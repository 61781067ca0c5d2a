"""From the configuration to what grades every response.

`load_reward_manager` makes the reward manager. The signature of a user's function decides how it is
called. A per-sample function scores one response and is called with keywords:

    compute_score(data_source, solution_str, ground_truth, extra_info=None) -> number | dict

A whole-batch function takes the batch and returns the rewards, (B,) or (B, T):

    compute_reward(data: DataProto) -> Tensor

A function is called with the whole batch if a parameter is annotated `DataProto`, or if exactly one
parameter has no default and its name is none that a per-sample call passes; every other function is
called per sample. The manager `batch` calls it with lists instead:

    compute_score(data_sources, solution_strs, ground_truths, extra_infos) -> list

`RewardLoopWorker` and `RewardLoopManager` score for programs of one's own; a trainer grades
trajectories as they end.
"""

import asyncio
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from importlib import import_module
from inspect import Parameter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.config.roles import has_own_loops
from verl.protocol import DataProto
from verl.trainer.ppo.utils import need_reward_model
from verl.utils.environment import Misuse
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import (
    CannotLoad,
    NoModuleFile,
    NoSuchName,
    load_class_from_fqn,
    load_extern_object,
    load_module,
    require,
)
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.reward_manager.abstract import scores_on_last_token
from verl.workers.reward_manager.adapters import (
    GradingManager,
    RewardManagerBase,
    compute_reward,
    name_of,
)
from verl.workers.reward_manager.grader import RewardError, is_async
from verl.workers.reward_manager.managers import DEFAULT_BATCH_SECONDS, BatchRewardManager
from verl.workers.reward_manager.registry import get_reward_manager_cls

__all__ = [
    "RewardError",
    "compute_reward",
    "compute_reward_async",
    "default_reward_function",
    "get_custom_reward_fn",
    "load_reward_manager",
]

logger = logging.getLogger(__name__)


class WrongForm(Misuse, ValueError):
    """A reward function that its manager cannot call."""


RewardFunction = Callable[..., Any]

_PER_SAMPLE = {"data_source", "solution_str", "ground_truth", "extra_info"}
_PER_SAMPLE_LISTS = {"data_sources", "solution_strs", "ground_truths", "extra_infos"}
_SERVED = {"reward_router_address", "reward_model_tokenizer"}
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_prepared_classes: set[type[RewardManagerBase]] = set()


def get_custom_reward_fn(config: Any) -> RewardFunction | None:
    """The function that `custom_reward_function.path` and `.name` point at; None without a path.

    `custom_reward_function.reward_kwargs` are passed to every call and win over what it passes.
    """
    section = config.custom_reward_function
    if not section.path:
        return None
    try:
        function = load_extern_object(section.path, section.name)
    except (NoModuleFile, NoSuchName, CannotLoad) as error:
        raise type(error)(f"custom_reward_function: {error}") from error
    if not callable(function):
        raise WrongForm(
            f"custom_reward_function.name ({section.name}) in {section.path} is "
            f"{type(function).__name__}, not a function"
        )
    return with_fixed_kwargs(function, _fixed_kwargs(section))


def load_reward_manager(
    config: Any,
    tokenizer: Any,
    num_examine: int,
    *,
    reward_router_address: str | None = None,
    reward_model_tokenizer: Any = None,
    **reward_kwargs: Any,
) -> Callable[..., Any]:
    """What scores a batch: `manager(data, return_dict=True)`.

    A custom function of the form `(DataProto) -> Tensor` does it by itself. Every other function,
    or the one that is built in for the data source, goes to the manager `reward_manager.name`.
    With the address of a served reward model, the function is called with that and the tokenizer.
    """
    function = get_custom_reward_fn(config)
    if function is not None:
        given = _fixed_kwargs(config.custom_reward_function)
        is_whole_batch, reason = takes_whole_batch(function, given)
        manner = "once with the whole batch" if is_whole_batch else "once per response"
        logger.info("reward function %s is called %s: %s", name_of(function), manner, reason)
        if is_whole_batch:
            return _whole_batch(function, reward_kwargs)
    if function is None:
        function = default_reward_function(config)
    served: dict[str, Any] = {}
    if reward_router_address is not None:
        served["reward_router_address"] = reward_router_address
        served["reward_model_tokenizer"] = reward_model_tokenizer
    manager_class = _manager_class(config)
    if issubclass(manager_class, RewardManagerBase):
        offered = {"compute_score": function, **served}
        return _loop_style_manager(manager_class, config, tokenizer, offered, reward_kwargs)
    fixed = {*_fixed_kwargs(config.custom_reward_function), *served}
    options = _options_of(manager_class, function, config, fixed, {*reward_kwargs})
    function = with_fixed_kwargs(function, served)
    return manager_class(
        tokenizer=tokenizer,
        num_examine=num_examine,
        compute_score=function,
        reward_fn_key=config.data.reward_fn_key,
        **{**options, **reward_kwargs},
    )


def default_reward_function(config: Any) -> RewardFunction:
    """The built-in function, which looks at the data source; code runs where the config says."""
    compute_score = import_module("verl.utils.reward_score").default_compute_score
    sandbox = config.reward_model.sandbox_fusion
    if not sandbox.url:
        return compute_score
    return functools.partial(
        compute_score,
        sandbox_fusion_url=sandbox.url,
        concurrent_semaphore=threading.Semaphore(sandbox.max_concurrent),
        memory_limit_mb=sandbox.memory_limit_mb,
    )


def grades_by_source(config: Any) -> bool:
    """Whether every response is graded by the function built in for its data source.

    A reward function, a manager, a reward model or an agent loop of the user's own may do without
    data source and answer.
    """
    return _asks_built_in_functions(config) and not has_own_loops(None, config)


def has_built_in_scores(config: Any) -> bool:
    """Whether scores are what the built-in functions gave, without a penalty of the manager."""
    buffer = config.reward_model.reward_kwargs.get("overlong_buffer_cfg") or {}
    return _asks_built_in_functions(config) and not buffer.get("enable", False)


def _asks_built_in_functions(config: Any) -> bool:
    manager = config.reward_manager
    return (
        not config.custom_reward_function.path
        and not need_reward_model(config)
        and config.reward_model.reward_loop_source != "importlib"
        and manager.source == "register"
        and manager.name in ("naive", "dapo", "prime", "rate_limited", "limited", "remote")
    )


class BackgroundReward:
    """Scores a batch in a Ray task: `compute_reward_async.remote(data, config, tokenizer)`.

    Without `reward_fn` the manager is built in the task from `config` and `tokenizer`. Called
    without `.remote` it scores here and now.
    """

    def __call__(
        self,
        data: DataProto,
        config: Any = None,
        tokenizer: Any = None,
        reward_fn: RewardFunction | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        if reward_fn is None:
            if config is None or tokenizer is None:
                raise ValueError("compute_reward_async needs reward_fn, or config and tokenizer")
            kwargs = config.reward_model.reward_kwargs
            reward_fn = load_reward_manager(config, tokenizer, num_examine=0, **kwargs)
        return compute_reward(data, reward_fn)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start the task and return its reference."""
        ray = require("ray", extra="ray")

        def compute_reward_async(*args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
            return BackgroundReward()(*args, **kwargs)

        return ray.remote(num_cpus=1)(compute_reward_async).remote(*args, **kwargs)


compute_reward_async = BackgroundReward()


def _fixed_kwargs(section: Any) -> dict[str, Any]:
    return dict(section["reward_kwargs"] or {}) if "reward_kwargs" in section else {}


def _whole_batch(function: RewardFunction, reward_kwargs: Mapping[str, Any]) -> "WholeBatchReward":
    """There is no manager then, so its options say nothing, but for the time."""
    options = {k: v for k, v in reward_kwargs.items() if k == "timeout_seconds"}
    unused = sorted(reward_kwargs.keys() - options.keys())
    if unused:
        logger.warning("reward_model.reward_kwargs %s: no manager is there to read them", unused)
    return WholeBatchReward(function, **options)


def _manager_class(config: Any) -> type[Any]:
    """`reward_manager.source` says whether the name is registered or a class in a file.

    `reward_model.reward_loop_source=importlib` names a class in a file too, and wins.
    """
    section, loop = config.reward_manager, config.reward_model
    if "reward_loop_source" in loop and loop.reward_loop_source == "importlib":
        path, name = loop.reward_loop_module_path, loop.reward_loop_class_name
        if not path or not name:
            raise ValueError(
                "reward_model.reward_loop_source is 'importlib', so reward_loop_module_path "
                f"({path}) and reward_loop_class_name ({name}) must name the class"
            )
        return load_extern_object(path, name)
    if section.source == "register":
        return get_reward_manager_cls(section.name)
    if not section.module.path:
        raise ValueError(
            "reward_manager.source is 'importlib', so reward_manager.module.path must name the "
            f"file that defines {section.name}"
        )
    load_module(section.module.path, section.module.name)
    return load_class_from_fqn(f"{section.module.name}.{section.name}", "reward manager")


def _options_of(
    manager_class: Any,
    function: RewardFunction,
    config: Any,
    fixed: set[str],
    reward_kwargs: set[str],
) -> dict[str, Any]:
    """What the configuration says to a built-in manager; the function must suit it.

    `fixed` are the keywords that every call has, `reward_kwargs` the options of the manager.
    """
    if not issubclass(manager_class, GradingManager):
        return {}
    refuse_other_form(function, takes_lists=issubclass(manager_class, BatchRewardManager))
    if manager_class.grade.__module__ == BatchRewardManager.__module__:  # else a user's own call
        refuse_other_parameters(function, manager_class, fixed, reward_kwargs)
        warn_of_unread(manager_class, reward_kwargs)
    return manager_class.options_of(config)


def _loop_style_manager(
    manager_class: type[RewardManagerBase],
    config: Any,
    tokenizer: Any,
    offered: Mapping[str, Any],
    reward_kwargs: Mapping[str, Any],
) -> RewardManagerBase:
    """Made from the configuration, with those of the usual arguments that its class takes."""
    if manager_class not in _prepared_classes:
        manager_class.init_class(config, tokenizer)
        _prepared_classes.add(manager_class)
    parameters = inspect.signature(manager_class).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    taken = {k: v for k, v in offered.items() if takes_all or k in parameters}
    manager = manager_class(config, tokenizer, **taken)
    for name in ("timeout_seconds", "max_concurrent"):
        if name in reward_kwargs:
            setattr(manager, name, reward_kwargs[name])
    return manager


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
        raise WrongForm(
            f"reward_manager.name is batch, which calls the reward function with "
            f"{', '.join(sorted(_PER_SAMPLE_LISTS))}; {name_of(function)} takes "
            f"{', '.join(sorted(names))}: set reward_manager.name=naive, or "
            "custom_reward_function.path to a function of lists"
        )
    if not takes_lists and names & _PER_SAMPLE_LISTS:
        raise WrongForm(
            f"reward function {name_of(function)} takes lists "
            f"({', '.join(sorted(names & _PER_SAMPLE_LISTS))}); set reward_manager.name=batch"
        )


def refuse_other_parameters(
    function: Callable[..., Any], manager_class: type, fixed: set[str], reward_kwargs: set[str]
) -> None:
    """Compare the keywords that a built-in manager passes with what the function takes.

    A manager for lists passes on those of `reward_model.reward_kwargs` that are none of its own.
    """
    keywords = {*_PER_SAMPLE, *fixed}
    if issubclass(manager_class, BatchRewardManager):
        own = inspect.signature(manager_class).parameters
        keywords = {*_PER_SAMPLE_LISTS, *fixed, *(reward_kwargs - own.keys())}
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(keywords))
    except TypeError as error:
        raise WrongForm(
            f"reward function {name_of(function)}{signature} is called with the keywords "
            f"{', '.join(sorted(keywords))}: {error}; take them all, or **kwargs"
        ) from error


def warn_of_unread(manager_class: type, reward_kwargs: set[str]) -> None:
    """Name the `reward_model.reward_kwargs` that no constructor of the manager has a parameter for.

    The manager for lists passes them to the function, which `refuse_other_parameters` looks at.
    """
    inits = [vars(cls)["__init__"] for cls in manager_class.__mro__ if "__init__" in vars(cls)]
    read = {name for init in inits for name in inspect.signature(init).parameters}
    unread = sorted(reward_kwargs - read)
    if unread and not issubclass(manager_class, BatchRewardManager):
        logger.warning(
            "reward_model.reward_kwargs %s: %s does not read them", unread, manager_class.__name__
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


class RewardLoopWorker:
    """Scores with the reward manager that the configuration names.

    `reward_router_address` is where a served reward model answers; a custom reward function gets it
    as a keyword argument.
    """

    def __init__(self, config: Any, reward_router_address: str | None = None) -> None:
        self.config = config
        self.reward_router_address = reward_router_address
        self.reward_manager = _manager(config, reward_router_address)

    async def compute_score(self, data: DataProto) -> dict[str, Any]:
        """`reward_score` and `reward_extra_info` of a batch of one response."""
        manager = self.reward_manager
        if isinstance(manager, RewardManagerBase):
            return await manager.run_single(data)
        if isinstance(manager, GradingManager) and manager.scope == "trajectory":
            return await manager.run_single(data)
        raise ValueError(
            f"reward_manager.name={self.config.reward_manager.name} scores whole batches; a "
            "reward loop asks for one response: use naive, dapo, prime, remote or rate_limited"
        )

    async def compute_score_batch(self, data: DataProto) -> list[dict[str, Any]]:
        """The same for every row, at the same time."""
        rows = [data[row : row + 1] for row in range(len(data))]
        return list(await asyncio.gather(*(self.compute_score(row) for row in rows)))


class RewardLoopManager:
    """Scores batches with the reward manager that the configuration names."""

    def __init__(self, config: Any, rm_resource_pool: Any = None) -> None:
        self.config = config
        self.reward_manager = _manager(config, None)

    def compute_rm_score(self, data: DataProto) -> DataProto:
        """`rm_scores` (B, T), a column for each thing that was reported, and their names in
        `meta_info["reward_extra_keys"]`. A response that cannot be scored is an error."""
        rewards, extras = compute_reward(data, self.reward_manager)
        columns: dict[str, Any] = {}
        for name, values in extras.items():
            columns[name] = np.empty(len(data), dtype=object)
            columns[name][:] = values
        return DataProto.from_dict(
            tensors={"rm_scores": rewards},
            non_tensors=columns,
            meta_info={"reward_extra_keys": list(extras)},
        )


def _manager(config: Any, reward_router_address: str | None) -> RewardFunction:
    model = config.actor_rollout_ref.model
    served: dict[str, Any] = {}
    if reward_router_address is not None:
        served["reward_router_address"] = reward_router_address
        served["reward_model_tokenizer"] = _tokenizer(config.reward_model.model.path, config)
    return load_reward_manager(
        config,
        _tokenizer(model.tokenizer_path or model.path, config),
        num_examine=0,
        **served,
        **config.reward_model.reward_kwargs,
    )


def _tokenizer(path: str, config: Any) -> Any:
    trusts = config.actor_rollout_ref.model.trust_remote_code
    return hf_tokenizer(copy_to_local(path), trust_remote_code=trusts)
