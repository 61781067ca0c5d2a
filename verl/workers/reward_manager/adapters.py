"""verl's shapes of rewards as graders; `as_grader` adapts them when they are loaded.

    reward function per response      a built-in manager calls it, and is a grader itself
    manager with `run_single(data)`   `RunSingleGrader`, scope trajectory
    manager with `__call__(data, return_dict)`, or a function `(DataProto) -> Tensor`
                                      `BatchGrader`, scope step

Managers see batches, graders see trajectories. `row_trajectories` goes from the rows of a batch to
trajectories; a `ToBatch`, which whoever generates provides, goes the other way.
"""

import asyncio
import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.protocol.trajectory import Grade, Group, Score, Segment, Trajectory
from verl.utils.torch_functional import kept_tokens
from verl.workers.reward_manager.abstract import precomputed_rewards, required_rewards
from verl.workers.reward_manager.grader import (
    Grader,
    RewardError,
    as_result,
    from_result,
)
from verl.workers.reward_manager.registry import REWARD_MANAGER_REGISTRY
from verl.workers.reward_manager.service import MAX_WAIT_SECONDS, GradingService

ToBatch = Callable[[Sequence[Trajectory]], DataProto]
"""The padded batch of some trajectories, with the columns of their rows."""


def as_grader(reward_fn: Any, to_batch: ToBatch) -> Grader:
    """The grader that a reward manager or function amounts to.

    A method that a user's subclass of a built-in manager overrides is the one that is called.
    """
    if isinstance(reward_fn, ConfiguredManager) and not _is_users_own(reward_fn, "run_single"):
        reward_fn = reward_fn.manager
    if isinstance(reward_fn, RewardManagerBase | GradingManager):
        if _is_users_own(reward_fn, "__call__"):
            return BatchGrader(reward_fn, to_batch)
        if isinstance(reward_fn, RewardManagerBase) or _is_users_own(reward_fn, "run_single"):
            return RunSingleGrader(reward_fn, to_batch)
    return reward_fn if isinstance(reward_fn, Grader) else BatchGrader(reward_fn, to_batch)


def _is_users_own(manager: Any, method: str) -> bool:
    owner = next(cls for cls in type(manager).__mro__ if method in vars(cls))
    return not owner.__module__.startswith("verl.workers.reward_manager.")


def row_trajectories(data: DataProto) -> list[Trajectory]:
    """The responses of a batch; `sample` is the number of the row."""
    arrays, tokens = data.non_tensor_batch, data.batch["responses"]
    mask = data.batch.get("attention_mask", torch.ones_like(tokens))[:, -tokens.shape[1] :]
    ids = kept_tokens(tokens, mask)
    names = list(arrays)
    rows = zip(*arrays.values(), strict=True) if arrays else [()] * len(data)
    trajectories = []
    for number, values in enumerate(rows):
        row = dict(zip(names, values, strict=True))
        prompt = Segment(author="template", token_ids=[])
        response = Segment(
            author="model", token_ids=ids[number].tolist(), is_trained=True, parent=0
        )
        trajectory = Trajectory(
            uid=str(row.get("uid", number)),
            sample=number,
            row=row,
            segments=[prompt, response],
            num_turns=int(row.get("__num_turns__", -1)),
            extra_fields=row.get("tool_extra_fields") or {},
        )
        trajectories.append(trajectory)
    return trajectories


def groups_of(trajectories: Sequence[Trajectory]) -> list[Group]:
    """Trajectories of equal `uid` together, in the order in which uids appear."""
    groups: dict[str, Group] = {}
    for trajectory in trajectories:
        uid = trajectory.uid
        group = groups.setdefault(uid, Group(index=len(groups), uid=uid, drawn_at=-1))
        group.trajectories.append(trajectory)
    return list(groups.values())


def rows_as_batch(data: DataProto) -> ToBatch:
    """For trajectories that are rows of `data`; all of them together are `data` itself."""

    def to_batch(trajectories: Sequence[Trajectory]) -> DataProto:
        rows = [trajectory.sample for trajectory in trajectories]
        if rows == list(range(len(data))):
            return data
        return data.select_idxs(rows)

    return to_batch


def grades_of(data: DataProto, reward_fn: Any) -> list[Grade | None]:
    """One grade per row, each tried once."""
    trajectories = row_trajectories(data)
    service = GradingService(as_grader(reward_fn, rows_as_batch(data)))
    try:
        service.grade_once(trajectories).result(timeout=MAX_WAIT_SECONDS)
    finally:
        service.close()
    return [trajectory.grade for trajectory in trajectories]


class GradingManager(Grader):
    """A built-in reward manager: a grader that can be called with a batch."""

    name = "the reward function"

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        result = precomputed_rewards(data)
        if result is None:
            result = required_rewards(data, grades_of(data, self))
        return result if return_dict else result["reward_tensor"]

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Grade a batch of one response: `reward_score` and `reward_extra_info`.

        `as_result` says how a response without a score is marked.
        """
        (trajectory,) = row_trajectories(data)
        service = GradingService(self)
        try:
            await asyncio.wrap_future(service.grade_once([trajectory]))
        finally:
            service.close()
        assert trajectory.grade is not None
        return as_result(trajectory.grade)

    @classmethod
    def options_of(cls, config: Any) -> dict[str, Any]:
        """Keyword arguments that the configuration has beside `reward_model.reward_kwargs`."""
        return {}


class RunSingleGrader(Grader):
    """Asks `run_single` of a manager about a batch of one response."""

    def __init__(self, manager: Any, to_batch: ToBatch) -> None:
        self.name = f"{type(manager).__name__}.run_single"
        self.timeout_seconds = manager.timeout_seconds
        self.max_concurrent = manager.max_concurrent
        self._manager, self._to_batch = manager, to_batch

    async def grade(self, trajectory: Trajectory) -> Grade:
        return from_result(await self._manager.run_single(self._to_batch([trajectory])))


class BatchGrader(Grader):
    """Calls a manager or function with the batch of a whole step, in the thread that waits."""

    scope = "step"
    is_retryable = False
    timeout_seconds = math.inf

    def __init__(self, reward_fn: Callable[..., Any], to_batch: ToBatch) -> None:
        self.name = name_of(reward_fn)
        self._reward_fn, self._to_batch = reward_fn, to_batch

    async def grade(self, trajectory: Trajectory) -> Grade:
        (grade,) = await self.grade_many([trajectory])
        return grade

    async def grade_many(self, trajectories: Sequence[Trajectory]) -> list[Grade]:
        rewards, extras = compute_reward(self._to_batch(trajectories), self._reward_fn)
        token_values = rewards.cpu().numpy()
        return [
            Score(value, {name: values[row] for name, values in extras.items()}, token_values[row])
            for row, value in enumerate(rewards.sum(-1).tolist())
        ]


def compute_reward(data: DataProto, reward_fn: Callable[..., Any]) -> tuple[Tensor, dict[str, Any]]:
    """Rewards per token, (B, T), and what was reported beside them, a list of B values per name."""
    try:
        if _accepts_return_dict(reward_fn):
            result = reward_fn(data, return_dict=True)
        else:
            result = reward_fn(data)
    except Exception as error:
        raise RewardError(
            f"{name_of(reward_fn)} failed on a batch of {len(data)} responses "
            f"{_sources(data)}: {error!r}"
        ) from error
    if isinstance(result, Mapping):
        rewards, extras = result["reward_tensor"], dict(result.get("reward_extra_info", {}))
    else:
        rewards, extras = result, {}
    _check_rewards(rewards, data, reward_fn)
    for key, values in extras.items():
        if len(values) != len(data):
            raise RewardError(
                f"{name_of(reward_fn)} reported {len(values)} values of {key!r} for {len(data)} "
                "responses; a response without one needs None in its place"
            )
    return rewards, extras


def name_of(function: Callable[..., Any]) -> str:
    return function.__qualname__ if inspect.isroutine(function) else type(function).__qualname__


def _accepts_return_dict(reward_fn: Callable[..., Any]) -> bool:
    parameters = inspect.signature(reward_fn).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return "return_dict" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _check_rewards(rewards: Any, data: DataProto, reward_fn: Callable[..., Any]) -> None:
    expected = tuple(data.batch["responses"].shape)
    if not isinstance(rewards, Tensor) or tuple(rewards.shape) != expected:
        got = tuple(rewards.shape) if isinstance(rewards, Tensor) else type(rewards).__name__
        raise RewardError(
            f"{name_of(reward_fn)} returned {got}; rewards are a tensor of shape {expected}, one "
            "value per response token"
        )
    is_finite = torch.isfinite(rewards.to(torch.float32)).all(-1)
    broken = torch.nonzero(~is_finite).flatten().tolist()
    if broken:
        raise RewardError(
            f"{name_of(reward_fn)} returned rewards that are not finite for responses {broken[:8]}"
        )


def _sources(data: DataProto) -> str:
    sources = data.non_tensor_batch.get("data_source")
    return "" if sources is None else f"from {sorted(set(map(str, sources)))}"


class RewardManagerBase(ABC):
    """A manager of the other style: made from the configuration, asked for one response.

        class Mine(RewardManagerBase):
            async def run_single(self, data: DataProto) -> dict:
                return {"reward_score": 1.0, "reward_extra_info": {"acc": True}}

    `config` is the whole configuration. A subclass may also take `compute_score`,
    `reward_router_address` and `reward_model_tokenizer`. `timeout_seconds` and `max_concurrent` may
    be set on the class or in `reward_kwargs`.
    """

    timeout_seconds: float = 300.0
    max_concurrent: int = 64

    def __init__(self, config: Any, tokenizer: Any) -> None:
        self.config = config
        self.tokenizer = tokenizer

    @classmethod  # noqa: B027
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """Called once per class before its first manager is made: for clients and the like."""

    @abstractmethod
    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score a batch of one response: `reward_score` and `reward_extra_info`.

        A score of None abstains; an error or a time-out is an infra error, never a score.
        """

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that `run_single` is called on."""
        return asyncio.get_running_loop()

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        result = precomputed_rewards(data)
        if result is None:
            result = required_rewards(data, grades_of(data, self))
        return result if return_dict else result["reward_tensor"]


class ConfiguredManager(RewardManagerBase):
    """A manager of the usual style, `manager_class`, made from the configuration."""

    manager_class: ClassVar[Any]

    def __init__(
        self,
        config: Any = None,
        tokenizer: Any = None,
        compute_score: Callable[..., Any] | None = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
        num_examine: int | None = None,
        reward_fn_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        """`config` may be missing, and the arguments after the tokenizers are those of an older
        signature: the configuration has their values, so they are not read."""
        super().__init__(config, tokenizer)
        self.is_async_reward_score = inspect.iscoroutinefunction(compute_score)
        if compute_score is not None and reward_router_address is not None:
            compute_score = functools.partial(
                compute_score,
                reward_router_address=reward_router_address,
                reward_model_tokenizer=reward_model_tokenizer,
            )
        self.compute_score = compute_score
        self.manager: GradingManager = self.manager_class(
            tokenizer, 0, compute_score, **self._options(config)
        )
        self.timeout_seconds = self.manager.timeout_seconds
        self.max_concurrent = self.manager.max_concurrent

    def _options(self, config: Any) -> dict[str, Any]:
        """Configurations of people's own programs may lack sections that have defaults."""
        if config is None or "reward_model" not in config:
            return {}
        options = dict(self.manager_class.options_of(config))
        section = config["reward_model"]
        if "reward_kwargs" in section:
            options |= section["reward_kwargs"] or {}
        if "data" in config and "reward_fn_key" in config["data"]:
            options["reward_fn_key"] = config["data"]["reward_fn_key"]
        return options

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        result = await self.manager.run_single(data)
        extras = {"score": result["reward_score"], **result["reward_extra_info"]}
        return {**result, "reward_extra_info": extras}


@functools.cache
def loop_style(manager_class: type[Any]) -> type[Any]:
    """The same manager in the style of `RewardManagerBase`; one of whole batches stays itself."""
    is_usual = issubclass(manager_class, GradingManager) and manager_class.scope == "trajectory"
    if not is_usual:
        return manager_class
    members = {
        "manager_class": manager_class,
        "__doc__": manager_class.__doc__,
        "__module__": manager_class.__module__,
    }
    return type(manager_class.__name__, (ConfiguredManager,), members)


def get_reward_manager_cls(name: str) -> type[Any]:
    """The class behind a name, made with `(config, tokenizer, compute_score, ...)`."""
    return loop_style(REWARD_MANAGER_REGISTRY[name])
