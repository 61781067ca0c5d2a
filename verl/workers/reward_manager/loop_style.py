"""Reward managers of the other style: made from the configuration, asked for one response.

    class Mine(RewardManagerBase):
        async def run_single(self, data: DataProto) -> dict:
            return {"reward_score": 1.0, "reward_extra_info": {"acc": True}}

`RewardManagerBase` gives such a class everything else: batches, deadlines, scoring while others
generate. `loop_style` gives a built-in manager the same style.
"""

import asyncio
import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from verl.protocol import DataProto
from verl.workers.reward_manager.async_functions import awaited
from verl.workers.reward_manager.grading import PerResponseManager
from verl.workers.reward_manager.registry import REWARD_MANAGER_REGISTRY
from verl.workers.reward_manager.results import Grade, InfraError, from_result


class RewardManagerBase(PerResponseManager):
    """`config` is the whole configuration.

    A subclass may also take `compute_score`, `reward_router_address` and `reward_model_tokenizer`.
    `timeout_seconds` and `max_concurrent` may be set on the class or in `reward_kwargs`.
    """

    timeout_seconds = 300.0

    def __init__(self, config: Any, tokenizer: Any) -> None:
        self.config = config
        self.tokenizer = tokenizer

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """Called once per class before its first manager is made: for clients and the like."""

    @abstractmethod
    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score a batch of one response: `reward_score` and `reward_extra_info`.

        A score of None abstains; an error or a time-out is a fault, never a score.
        """

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that `run_single` is called on."""
        return asyncio.get_running_loop()

    def responses(self, data: DataProto) -> list[DataProto]:
        return [data[row : row + 1] for row in range(len(data))]

    async def judge(self, response: DataProto) -> Grade:
        name = f"{type(self).__name__}.run_single"
        try:
            work = awaited(self.run_single(response))
            result = await asyncio.wait_for(work, self.timeout_seconds)
        except asyncio.TimeoutError:
            return InfraError(f"{name} took longer than {self.timeout_seconds} s", is_timeout=True)
        except Exception as error:
            return InfraError(f"{name} raised {type(error).__name__}: {error}")
        return from_result(result)


class Configured(RewardManagerBase):
    """A manager of the usual style, `manager_class`, made from the configuration."""

    manager_class: ClassVar[Any]

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Callable[..., Any] | None = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer)
        if compute_score is not None and reward_router_address is not None:
            compute_score = functools.partial(
                compute_score,
                reward_router_address=reward_router_address,
                reward_model_tokenizer=reward_model_tokenizer,
            )
        self.compute_score = compute_score
        self.manager: PerResponseManager = self.manager_class(
            tokenizer, 0, compute_score, **self._options(config)
        )
        self.timeout_seconds = self.manager.timeout_seconds
        self.max_concurrent = self.manager.max_concurrent

    def _options(self, config: Any) -> dict[str, Any]:
        """Configurations of people's own programs may lack sections that have defaults."""
        options = dict(self.manager_class.options_of(config))
        section = config["reward_model"]
        if "reward_kwargs" in section:
            options |= section["reward_kwargs"] or {}
        if "data" in config and "reward_fn_key" in config["data"]:
            options["reward_fn_key"] = config["data"]["reward_fn_key"]
        return options

    def responses(self, data: DataProto) -> list[Any]:
        return self.manager.responses(data)

    async def judge(self, response: Any) -> Grade:
        return await self.manager.judge(response)

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        return await self.manager.run_single(data)


@functools.cache
def loop_style(manager_class: type[Any]) -> type[Any]:
    """The same manager in the style of `RewardManagerBase`; one of whole batches stays itself."""
    is_usual = issubclass(manager_class, PerResponseManager)
    if not is_usual or issubclass(manager_class, RewardManagerBase):
        return manager_class
    members = {
        "manager_class": manager_class,
        "__doc__": manager_class.__doc__,
        "__module__": manager_class.__module__,
    }
    return type(manager_class.__name__, (Configured,), members)


def get_reward_manager_cls(name: str) -> type[Any]:
    """The class behind a name, made with `(config, tokenizer, compute_score, ...)`."""
    return loop_style(REWARD_MANAGER_REGISTRY[name])
