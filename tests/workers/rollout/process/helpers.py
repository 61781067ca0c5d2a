"""Engine processes for the tests, and what to send them."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.workers.rollout.process.counting import ABSENT
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.process.client import EngineProcess, EngineSpec

REPOSITORY = Path(__file__).parents[4]
BLOCKER = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ImportError(f"{{name}} is not installed in an engine's environment")

sys.meta_path.insert(0, Blocker())
"""


def counting_spec(folder: Path, options: dict[str, Any] | None = None, **spec: Any) -> EngineSpec:
    """The counting engine, where nothing but torch can be imported."""
    (folder / "sitecustomize.py").write_text(BLOCKER)
    return EngineSpec(
        build="tests.workers.rollout.process.counting:build",
        options=options or {},
        environment={
            "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}",
            "OMP_NUM_THREADS": "1",
        },
        **{"bucket_bytes": 64, **spec},
    )


def counting_weights(value: int) -> Iterable[tuple[str, Tensor]]:
    """Tensors that add up to `value`; one spans several buckets of 64 bytes."""
    long = torch.zeros(50)
    long[49] = value
    return [("first", torch.zeros(3)), ("long", long), ("last", torch.zeros(2, 2))]


def request(
    prompt_ids: list[int], max_tokens: int = 3, request_id: str = "r", **options: Any
) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return GenerationRequest(request_id=request_id, prompt_ids=prompt_ids, params=params, **options)


def runs(pid: int) -> bool:
    """Whether the process is there and not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def started(spec: EngineSpec, version: int | None = None) -> EngineProcess:
    engine = EngineProcess(spec)
    engine.start()
    if version is not None:
        engine.update_weights(counting_weights(version), version)
    return engine
