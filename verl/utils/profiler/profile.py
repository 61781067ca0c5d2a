"""A profiler per rank: which ranks record, when, and into which file.

The controller calls `start_profile` and `stop_profile` on the workers around the steps that
`global_profiler.steps` names; `DistProfilerExtension` gives a worker these two methods. On a rank
that does not take part, every call returns at once.

A continuous recording covers everything between start and stop. A discrete one (`discrete: true`
in the tool's options) covers one method at a time: each method marked with
`@DistProfiler.annotate(role="actor_update")` writes a file of its own.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from verl.config.profiler import ProfilerConfig, ProfilerToolsConfig
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.profiler.timers import mark
from verl.utils.profiler.tools import ProfilerTool, profiler_tools

Function = TypeVar("Function", bound=Callable[..., Any])


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
        return self.config.all_ranks or self.rank in self.config.ranks

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

    def _begin(self, role: str) -> None:
        assert self._tool is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        self._tool.start(_free_path(self._folder, f"{role}{self._step_label}_rank{self.rank}"))
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
