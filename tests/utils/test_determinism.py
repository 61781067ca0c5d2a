"""The option that asks for deterministic kernels reaches torch, and an engine trains with them."""

import subprocess
import sys

PROGRAM = """
import torch
from tests.tiny_tokenizer import save_tiny_model
from tests.workers.engine.test_one_device import batch, weighted_sum
from verl.config.engine import FSDPEngineConfig
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.workers.engine import EngineRegistry, EngineSpec

engine = EngineRegistry.new(
    EngineSpec(
        model=HFModelConfig(path=str(save_tiny_model(FOLDER))),
        engine=FSDPEngineConfig(full_determinism=True),
        optimizer=FSDPOptimizerConfig(lr=0.01),
        device="cpu",
    )
)
engine.train_batch(batch(4), weighted_sum, micro_batching=[[0, 1], [2, 3]])
print(torch.are_deterministic_algorithms_enabled())
"""


def test_an_engine_with_full_determinism_trains_with_deterministic_kernels(tmp_path):
    """In a process of its own, for it concerns all of a process."""
    program = f"from pathlib import Path\nFOLDER = Path({str(tmp_path)!r})\n{PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.split()[-1] == "True"
