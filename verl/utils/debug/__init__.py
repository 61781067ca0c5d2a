"""Old import path of the timers and memory logs, which live in `verl.utils.profiler`."""

from verl.utils.profiler import (
    DistProfiler,
    DistProfilerExtension,
    GPUMemoryLogger,
    ProfilerConfig,
    log_gpu_memory_usage,
    marked_timer,
    simple_timer,
)

__all__ = [
    "DistProfiler",
    "DistProfilerExtension",
    "GPUMemoryLogger",
    "ProfilerConfig",
    "log_gpu_memory_usage",
    "marked_timer",
    "simple_timer",
]
