"""The clock, the order of runs, what the machine can do, and the record of it all."""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from verl.utils.flops_counter import get_device_flops

T = TypeVar("T")
PACKAGES = ("torch", "triton", "transformers", "tensordict", "trl", "accelerate")
GIB = 2**30


def back_and_forth(names: Sequence[T], rounds: int) -> Iterator[T]:
    """A B C, C B A, A B C: what drifts over time weighs on all of them alike."""
    for number in range(rounds):
        yield from names if number % 2 == 0 else reversed(names)


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def timed(run: Callable[[], T], device: str) -> tuple[float, T]:
    """Seconds of a run; the device is idle at both ends."""
    synchronize(device)
    start = time.perf_counter()
    result = run()
    synchronize(device)
    return time.perf_counter() - start, result


class Phases:
    """Seconds and peak memory of the named parts of one step."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.peak_gib: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Phases of their own do not overlap; `inside` is for what happens within one."""
        synchronize(self.device)
        if self.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        yield
        synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        peak = peak_gib(self.device)
        self.peak_gib[name] = max(self.peak_gib.get(name, 0.0), peak)

    def inside(self, name: str, run: Callable[..., T]) -> Callable[..., T]:
        """`run` with its seconds added to `name`, the device idle at both ends."""

        def clocked(*args: Any, **kwargs: Any) -> T:
            seconds, result = timed(lambda: run(*args, **kwargs), self.device)
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            return result

        return clocked


def medians(samples: list[dict[str, Any]], column: str) -> dict[str, float]:
    names = samples[0][column]
    return {name: statistics.median(sample[column][name] for sample in samples) for name in names}


def peak_gib(device: str) -> float:
    """Most memory of torch's allocator since the last reset; 0 on a CPU."""
    return 0.0 if device == "cpu" else torch.cuda.max_memory_allocated() / GIB


def ceilings(device: str) -> dict[str, float]:
    """What this machine reaches now: matrix products and copies, on random data."""
    on_cpu = device == "cpu"
    size, elements = (512, 1 << 20) if on_cpu else (8192, 1 << 29)
    dtype = torch.float32 if on_cpu else torch.bfloat16
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.randn(elements, device=device, dtype=dtype)
    target = torch.empty_like(source)
    product = median_seconds(lambda: a @ b, device)
    copy = median_seconds(lambda: target.copy_(source), device)
    return {
        "matmul_tflops": 2 * size**3 / product / 1e12,
        "copy_tb_per_s": 2 * source.nbytes / copy / 1e12,
    }


def median_seconds(run: Callable[[], Any], device: str, repeats: int = 10) -> float:
    """Of several runs of ten calls each: waiting for the device must not count."""

    def ten_calls() -> None:
        for _ in range(10):
            run()

    ten_calls()
    return statistics.median(timed(ten_calls, device)[0] / 10 for _ in range(repeats))


def environment(device: str, seed: int) -> dict[str, Any]:
    """What somebody needs to run it again."""
    return {
        "command": f"python -m {module_name(sys.argv[0])} {' '.join(sys.argv[1:])}",
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "device": "cpu" if device == "cpu" else torch.cuda.get_device_name(),
        "promised_tflops": None if device == "cpu" else get_device_flops("T"),
        "seed": seed,
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := installed(name))},
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "load_average": os.getloadavg(),
    }


def module_name(path: str) -> str:
    """The name by which `python -m` finds a file of this folder or of the one above."""
    file = Path(path).resolve()
    root = Path(__file__).resolve().parents[2]
    inside = file.relative_to(root) if file.is_relative_to(root) else Path(file.name)
    return ".".join(inside.with_suffix("").parts)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write(path: str, result: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps(result, indent=1) + "\n")
