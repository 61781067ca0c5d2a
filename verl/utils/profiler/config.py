"""The profiler's options, under the names that `_target_` uses; they live in `verl.config`."""

from verl.config.profiler import (
    NPUToolConfig,
    NsightToolConfig,
    ProfilerConfig,
    ProfilerToolsConfig,
    TorchMemoryToolConfig,
    TorchProfilerToolConfig,
)

__all__ = [
    "NPUToolConfig",
    "NsightToolConfig",
    "ProfilerConfig",
    "ProfilerToolsConfig",
    "TorchMemoryToolConfig",
    "TorchProfilerToolConfig",
]
