"""The built-in engine in a process of its own, made to disagree with the trainer on purpose.

Every weight is rounded to a few bits before it is used, as a quantized engine would; what it
reports are the log-probabilities of what it really sampled from.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.workers.rollout.process.client import EngineSpec
from verl.workers.rollout.process.native import HostedNativeEngine, build, native_options

ROOT = Path(__file__).parents[3]
BUILD = "tests.workers.rollout.mismatched:build_mismatched"


def mismatched_spec(model_path, limits, *, bits, **options):
    made = native_options(str(model_path), limits)
    return EngineSpec(
        build=BUILD,
        options={**made, "bits": bits},
        environment={"PYTHONPATH": str(ROOT)},  # where the process finds this file
        **options,
    )


def build_mismatched(options: Mapping[str, Any]) -> "RoundedEngine":
    """Runs in the engine's process."""
    return RoundedEngine(build(options).engine, options["bits"])


class RoundedEngine(HostedNativeEngine):
    def __init__(self, engine: Any, bits: int) -> None:
        super().__init__(engine)
        self._bits = bits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((name, rounded(weight, self._bits)) for name, weight in weights)


def rounded(weight: Tensor, bits: int) -> Tensor:
    """To the nearest of 2^bits - 1 evenly spaced values between plus and minus the largest."""
    largest = weight.abs().max().clamp_min(1e-30)
    steps = 2 ** (bits - 1) - 1
    return torch.round(weight / largest * steps) / steps * largest
