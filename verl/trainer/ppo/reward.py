"""From the configuration to a reward for every response.

`load_reward_manager` builds what scores a batch, `compute_reward` calls it and checks the answer.
An error in a reward function stops the step with the error as its cause: it is never a reward of
0, and no batch is scored twice.
"""

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.ppo.reward_functions import (
    WholeBatchReward,
    refuse_other_form,
    takes_whole_batch,
    with_fixed_kwargs,
)
from verl.utils.import_utils import load_class_from_fqn, load_extern_object, load_module, require
from verl.workers.reward_manager.adapters import (
    GradingManager,
    RewardManagerBase,
    compute_reward,
    name_of,
)
from verl.workers.reward_manager.grader import RewardError
from verl.workers.reward_manager.managers import BatchRewardManager
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

RewardFunction = Callable[..., Any]
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
    except (FileNotFoundError, AttributeError, RuntimeError) as error:
        raise type(error)(f"custom_reward_function: {error}") from error
    if not callable(function):
        raise ValueError(
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
    function = with_fixed_kwargs(function, served)
    return manager_class(
        tokenizer=tokenizer,
        num_examine=num_examine,
        compute_score=function,
        reward_fn_key=config.data.reward_fn_key,
        **{**_options_of(manager_class, function, config), **reward_kwargs},
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


def _whole_batch(function: RewardFunction, reward_kwargs: Mapping[str, Any]) -> WholeBatchReward:
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


def _options_of(manager_class: Any, function: RewardFunction, config: Any) -> dict[str, Any]:
    """What the configuration says to a built-in manager; the function must suit it."""
    if not issubclass(manager_class, GradingManager):
        return {}
    refuse_other_form(function, takes_lists=issubclass(manager_class, BatchRewardManager))
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
