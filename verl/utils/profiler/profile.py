"""Where time and memory go: timers, memory logs, and a profiler per rank.

`marked_timer` wraps a stage of the trainer. `log_gpu_memory_usage` logs accelerator memory before
and after a stage; a CPU has none to report.

The controller calls `start_profile` and `stop_profile` on the workers around the steps that
`global_profiler.steps` names; `DistProfilerExtension` gives a worker these two methods. On a rank
that does not take part, every call returns at once. A continuous recording covers everything
between start and stop. A discrete one (`discrete: true` in the tool's options) covers one method at
a time: each method marked with `@DistProfiler.annotate(role="actor_update")` writes its own file.
A tool that cannot work here says what is missing when it is created.
"""

import inspect
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch

from verl.config.profiler import (
    NPUToolConfig,
    NsightToolConfig,
    ProfilerConfig,
    ProfilerToolsConfig,
    TorchMemoryToolConfig,
    TorchProfilerToolConfig,
)
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import environment
from verl.utils.device import get_device_name, get_torch_device, is_cuda_available, is_npu_available
from verl.utils.registry import Registry

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


class ProfilerTool(ABC):
    """Records one process. `start` and `stop` alternate."""

    is_discrete: bool = False  # one recording per annotated method instead of one per step

    @abstractmethod
    def start(self, path: Path) -> None:
        """Begin a recording whose result goes to `path` plus a suffix; its folder exists."""

    @abstractmethod
    def stop(self) -> None:
        """End the recording and write the result."""


class TorchTool(ProfilerTool):
    """torch's profiler; the trace opens in Perfetto or `chrome://tracing`."""

    CONTENTS = ("cuda", "cpu", "memory", "shapes", "stack")

    def __init__(self, config: TorchProfilerToolConfig) -> None:
        unknown = sorted(set(config.contents) - set(self.CONTENTS))
        if unknown:
            raise ValueError(
                f"profiler.tool_config.torch.contents has {unknown}; "
                f"choose from: {', '.join(self.CONTENTS)}"
            )
        if "cuda" in config.contents:
            _require_cuda("profiler.tool_config.torch.contents=[cuda]", instead="contents=[cpu]")
        self.is_discrete = config.discrete
        self._contents = config.contents
        self._profile: torch.profiler.profile | None = None
        self._path = Path()

    def start(self, path: Path) -> None:
        self._path = path
        self._profile = torch.profiler.profile(
            activities=self._activities(),
            record_shapes="shapes" in self._contents,
            profile_memory="memory" in self._contents,
            with_stack="stack" in self._contents,
        )
        self._profile.start()

    def stop(self) -> None:
        assert self._profile is not None, "stop without start"
        self._profile.stop()
        self._profile.export_chrome_trace(f"{self._path}.json")
        self._profile = None

    def _activities(self) -> list[torch.profiler.ProfilerActivity]:
        """Those named; without any, everything this machine has."""
        kinds = torch.profiler.ProfilerActivity
        named = {"cpu": kinds.CPU, "cuda": kinds.CUDA}
        chosen = [kind for name, kind in named.items() if name in self._contents]
        everything = [kinds.CPU, kinds.CUDA] if is_cuda_available else [kinds.CPU]
        return chosen or everything


class TorchMemoryTool(ProfilerTool):
    """torch's history of CUDA allocations, for https://pytorch.org/memory_viz.

    torch records whole stacks, so `stack_depth` changes nothing.
    """

    def __init__(self, config: TorchMemoryToolConfig) -> None:
        _require_cuda("profiler.tool=torch_memory")
        self._max_entries = config.trace_alloc_max_entries
        self._path = Path()

    def start(self, path: Path) -> None:
        self._path = path
        torch.cuda.memory._record_memory_history(max_entries=self._max_entries)

    def stop(self) -> None:
        torch.cuda.memory._dump_snapshot(f"{self._path}.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)


class NsightTool(ProfilerTool):
    """Opens the capture range of an `nsys profile --capture-range=cudaProfilerApi` around us.

    Nsight writes the result itself, so nothing goes to `path`.
    """

    def __init__(self, config: NsightToolConfig) -> None:
        self.is_discrete = config.discrete

    def start(self, path: Path) -> None:
        _require_cuda("profiler.tool=nsys")
        torch.cuda.profiler.start()

    def stop(self) -> None:
        torch.cuda.profiler.stop()


class NPUTool(ProfilerTool):
    """Ascend's profiler, from the package `torch_npu`; the result is a folder."""

    def __init__(self, config: NPUToolConfig) -> None:
        if not is_npu_available:
            raise ValueError(
                "profiler.tool=npu needs the package torch_npu and an Ascend device, and torch "
                "sees none. Use tool=torch"
            )
        self.is_discrete = config.discrete
        self._config = config
        self._profile: Any = None

    def start(self, path: Path) -> None:
        npu = import_module("torch_npu.profiler")
        contents, level = self._config.contents, self._config.level
        activities = {"npu": npu.ProfilerActivity.NPU, "cpu": npu.ProfilerActivity.CPU}
        chosen = [kind for name, kind in activities.items() if name in contents]
        self._profile = npu.profile(
            activities=chosen or list(activities.values()),
            record_shapes="shapes" in contents,
            profile_memory="memory" in contents,
            with_modules="module" in contents,
            with_stack="stack" in contents,
            experimental_config=npu._ExperimentalConfig(
                profiler_level=vars(npu.ProfilerLevel)[level.capitalize()]
            ),
            on_trace_ready=npu.tensorboard_trace_handler(
                str(path), analyse_flag=self._config.analysis
            ),
        )
        self._profile.start()

    def stop(self) -> None:
        assert self._profile is not None, "stop without start"
        self._profile.stop()
        self._profile = None


profiler_tools = Registry[Callable[[Any], ProfilerTool]](
    "profiler tool", nsys=NsightTool, npu=NPUTool, torch=TorchTool, torch_memory=TorchMemoryTool
)


class DistProfiler:
    """Records this rank if `config` says so.

    `tool_config` is the options of the chosen tool; without it those in `config.tool_config` count.
    Results are `<save_path>/<role>[_step<profile_step>]_rank<rank>[_<n>]` plus the tool's suffix.
    """

    def __init__(
        self, rank: int, config: ProfilerConfig | None = None, tool_config: Any = None
    ) -> None:
        self.rank = rank
        self.config = config if config is not None else ProfilerConfig()
        self._tool: ProfilerTool | None = None
        if self.check_enable() and self.check_this_rank():
            self._tool = _make_tool(self.config, tool_config)
        self._folder = _save_folder(self.config)
        self._step_label: str | None = None  # set while a step is being profiled
        self._is_recording = False

    def check_enable(self) -> bool:
        """Whether this role is profiled at all."""
        return self.config.enable and self.config.tool is not None

    def check_this_rank(self) -> bool:
        return self.config.all_ranks or self.rank in (self.config.ranks or [0])

    def check_this_step(self) -> bool:
        """Whether we are between `start` and `stop`."""
        return self._step_label is not None

    def is_discrete_mode(self) -> bool:
        return self._tool is not None and self._tool.is_discrete

    def start(self, role: str = "profile", profile_step: int | str | None = None) -> None:
        """A step to profile begins. `role` and `profile_step` go into the names of the results."""
        if self._tool is None:
            return
        if self.check_this_step():
            raise ValueError("the profiler is already started; stop it first")
        self._step_label = "" if profile_step is None else f"_step{profile_step}"
        if not self._tool.is_discrete:
            self._begin(role)

    def stop(self) -> None:
        """The step is over; a continuous recording is written."""
        if self._tool is None or not self.check_this_step():
            return
        if self._is_recording:
            self._end()
        self._step_label = None

    @contextmanager
    def annotated(self, role: str) -> Iterator[None]:
        """A named range; in discrete mode also a recording, unless one runs around it already."""
        should_record = self.check_this_step() and not self._is_recording
        if should_record:
            self._begin(role)
        try:
            with mark(role):
                yield
        finally:
            if should_record:
                self._end()

    @classmethod
    def annotate(
        cls,
        message: str | None = None,
        color: str | None = None,
        domain: str | None = None,
        category: str | None = None,
        role: str | None = None,
    ) -> Callable[[Function], Function]:
        """Decorator for methods of an object that has a `profiler`; others just run.

        The range is called `role`, else `message`, else the method's name. `color`, `domain` and
        `category` are accepted for scripts that pass them; torch's ranges carry a name only.
        """

        def decorate(function: Function) -> Function:
            return _annotated(function, role or message or function.__name__)

        return decorate

    def path_for(self, what: str, sub_dir: str | None = None) -> Path:
        """Where this rank may write something that has no file yet."""
        folder = self._folder / (sub_dir or "")
        folder.mkdir(parents=True, exist_ok=True)
        return _free_path(folder, f"{what}{self._step_label or ''}_rank{self.rank}")

    def _begin(self, role: str) -> None:
        assert self._tool is not None
        self._tool.start(self.path_for(role))
        self._is_recording = True

    def _end(self) -> None:
        assert self._tool is not None
        self._is_recording = False
        self._tool.stop()


class DistProfilerExtension:
    """Gives a worker a `profiler` and the two methods that the controller calls around a step."""

    def __init__(self, profiler: DistProfiler) -> None:
        self.profiler = profiler

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, **kwargs: Any) -> None:
        """Takes what `DistProfiler.start` takes."""
        self.profiler.start(**kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> None:
        self.profiler.stop()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def dump_memory_snapshot(self, tag: str, sub_dir: str | None = None) -> str:
        """Write what the device holds now, for https://pytorch.org/memory_viz; the file's path."""
        _require_cuda("dump_memory_snapshot")
        path = self.profiler.path_for(tag, sub_dir).with_suffix(".pickle")
        torch.cuda.memory._dump_snapshot(str(path))
        return str(path)


def _make_tool(config: ProfilerConfig, tool_config: Any) -> ProfilerTool:
    assert config.tool is not None
    options = tool_config if tool_config is not None else config.tool_config
    if options is None:
        options = ProfilerToolsConfig()
    if isinstance(options, ProfilerToolsConfig):
        options = options[config.tool]
    return profiler_tools[config.tool](options)


def _save_folder(config: ProfilerConfig) -> Path:
    if config.save_path is None and config.enable:
        raise ValueError(
            "profiler.save_path is not set; name a folder in profiler.save_path or "
            "global_profiler.save_path"
        )
    return Path(config.save_path or ".").expanduser()


def _free_path(folder: Path, stem: str) -> Path:
    """A name that no earlier result has, whatever its suffix."""
    number = 0
    path = folder / stem
    while any(folder.glob(f"{path.name}.*")) or path.exists():
        number += 1
        path = folder / f"{stem}_{number}"
    return path


def _annotated(function: Function, role: str) -> Function:
    @wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        profiler = vars(self).get("profiler")
        if profiler is None:
            return function(self, *args, **kwargs)
        with profiler.annotated(role):
            return function(self, *args, **kwargs)

    @wraps(function)
    async def run_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        profiler = vars(self).get("profiler")
        if profiler is None:
            return await function(self, *args, **kwargs)
        with profiler.annotated(role):
            return await function(self, *args, **kwargs)

    is_async = inspect.iscoroutinefunction(function)
    return run_async if is_async else run  # pyright: ignore[reportReturnType]


@contextmanager
def simple_timer(name: str, timing_raw: MutableMapping[str, float]) -> Iterator[None]:
    """Add the seconds the block took to `timing_raw[name]`, also when it raises."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start


@contextmanager
def marked_timer(
    name: str,
    timing_raw: MutableMapping[str, float],
    color: str | None = None,
    domain: str | None = None,
    category: str | None = None,
) -> Iterator[None]:
    """`simple_timer` whose block also appears by name in a running profiler.

    `color`, `domain` and `category` are accepted for scripts that pass them; torch's NVTX ranges
    carry a name only.
    """
    logger.info("phase %s", name)
    with mark(name), simple_timer(name, timing_raw):
        yield
    logger.debug("phase %s: %.3f s so far", name, timing_raw[name])


@contextmanager
def mark(name: str) -> Iterator[None]:
    """A named range in torch's profiler and, on CUDA, in Nsight Systems."""
    with ExitStack() as stack:
        stack.enter_context(torch.profiler.record_function(name))
        if is_cuda_available:
            torch.cuda.nvtx.range_push(name)
            stack.callback(torch.cuda.nvtx.range_pop)
        yield


def _require_cuda(option: str, instead: str = "tool=torch") -> None:
    if not is_cuda_available:
        raise ValueError(f"{option} needs a CUDA device, and torch sees none. Use {instead}")


_module_logger = logging.getLogger(__name__)
_GIB = 1024**3


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
