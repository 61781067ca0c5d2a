"""Accelerator memory before and after a stage, as log lines. A CPU has none to report."""

import inspect
import logging
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from verl.utils import environment
from verl.utils.device import get_device_name, get_torch_device

_module_logger = logging.getLogger(__name__)
_GIB = 1024**3

Function = TypeVar("Function", bound=Callable[..., Any])


def log_gpu_memory_usage(
    head: str,
    logger: logging.Logger | None = None,
    level: int = logging.DEBUG,
    rank: int | None = 0,
) -> None:
    """Log allocated, reserved and used memory of this process's device, in GiB, after `head`.

    Only the process with this global `rank` logs; None means every process does.
    """
    if get_device_name() == "cpu" or rank not in (None, _global_rank()):
        return
    (logger if logger is not None else _module_logger).log(level, "%s, %s", head, _memory_report())


class GPUMemoryLogger:
    """Decorator that logs the memory before and after a method of a worker.

    @GPUMemoryLogger(role="actor", logger=logger)
    def update_policy(self, data): ...
    """

    def __init__(
        self,
        role: str,
        logger: logging.Logger | None = None,
        level: int = logging.DEBUG,
        log_only_rank_0: bool = True,
    ) -> None:
        self._role = role
        self._logger = logger
        self._level = level
        self._rank = 0 if log_only_rank_0 else None

    def __call__(self, function: Function) -> Function:
        if inspect.iscoroutinefunction(function):
            return self._around_async(function)  # pyright: ignore[reportReturnType]
        return self._around(function)  # pyright: ignore[reportReturnType]

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def logged(*args: Any, **kwargs: Any) -> Any:
            self._log("before", function)
            output = function(*args, **kwargs)
            self._log("after", function)
            return output

        return logged

    def _around_async(
        self, function: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Awaitable[Any]]:
        @wraps(function)
        async def logged(*args: Any, **kwargs: Any) -> Any:
            self._log("before", function)
            output = await function(*args, **kwargs)
            self._log("after", function)
            return output

        return logged

    def _log(self, moment: str, function: Callable[..., Any]) -> None:
        head = f"{self._role}: {moment} {function.__qualname__}"
        log_gpu_memory_usage(head, logger=self._logger, level=self._level, rank=self._rank)


def _memory_report() -> str:
    device = get_torch_device()
    free, total = device.mem_get_info()
    allocated, reserved = device.memory_allocated(), device.memory_reserved()
    return (
        f"memory allocated (GB): {allocated / _GIB:.2f}, memory reserved (GB): "
        f"{reserved / _GIB:.2f}, device memory used/total (GB): "
        f"{(total - free) / _GIB:.2f}/{total / _GIB:.2f}"
    )


def _global_rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return environment.rank()
