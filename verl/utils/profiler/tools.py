"""The profilers behind `profiler.tool`: what each needs, and what a recording leaves on disk.

A tool starts and stops; between the two it records this process. One that cannot work here says
what is missing when it is made, before any training step is spent.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from verl.config.profiler import (
    NPUToolConfig,
    NsightToolConfig,
    TorchMemoryToolConfig,
    TorchProfilerToolConfig,
)
from verl.utils.device import is_cuda_available, is_npu_available
from verl.utils.registry import Registry


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
        _require_cuda("profiler.tool=nsys")
        self.is_discrete = config.discrete

    def start(self, path: Path) -> None:
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


def _require_cuda(option: str, instead: str = "tool=torch") -> None:
    if not is_cuda_available:
        raise ValueError(f"{option} needs a CUDA device, and torch sees none. Use {instead}")


profiler_tools = Registry[Callable[[Any], ProfilerTool]](
    "profiler tool", nsys=NsightTool, npu=NPUTool, torch=TorchTool, torch_memory=TorchMemoryTool
)
