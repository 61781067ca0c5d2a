"""Where time and memory go: timers, memory logs, and a profiler per rank.

`marked_timer` is what the trainer wraps its stages in. `DistProfiler` is what a worker owns; it
records the steps it is told to, with the tool that the configuration names.
"""

from verl.config.profiler import ProfilerConfig
from verl.utils.profiler.profile import (
    DistProfiler,
    DistProfilerExtension,
    GPUMemoryLogger,
    log_gpu_memory_usage,
    mark,
    marked_timer,
    simple_timer,
)

__all__ = [
    "DistProfiler",
    "DistProfilerExtension",
    "GPUMemoryLogger",
    "ProfilerConfig",
    "log_gpu_memory_usage",
    "mark",
    "marked_timer",
    "simple_timer",
]
