"""How much saving slows training down: no saves, saves in between, saves in the background.

A model of about 20 million parameters trains on the CPU and saves every few steps to a disk that is
throttled to a given rate: every file takes at least its size divided by that rate. Reported are the
seconds of a training step, and the seconds for which a save keeps training from going on.

    python benchmarks/checkpoint_async.py [--megabytes-per-second 60] [--steps 8] [--every 4]
"""

import argparse
import json
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import torch
from tensordict import TensorDict
from transformers import AutoConfig

from verl.config.optimizer import FSDPOptimizerConfig
from verl.config.trainer import CheckpointConfig
from verl.models.loading import random_causal_lm
from verl.utils.checkpoint.background import Background, collect_receipts
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.checkpoint.store import CheckpointStore
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.roles.worker import CheckpointedWorker
from verl.workers.schedule import MicroBatching

RESULTS = Path(__file__).parent / "results" / "checkpoint_async.json"


class ThrottledDisk(FSDPCheckpointManager):
    """Every write takes as long as a disk of that rate needs for it."""

    bytes_per_second: float = 60e6

    def capture(self, keep):
        return [self._throttled(write) for write in super().capture(keep)]

    def _throttled(self, write):
        def slow(folder):
            before, start = size_of(folder), time.perf_counter()
            write(folder)
            needed = (size_of(folder) - before) / self.bytes_per_second
            time.sleep(max(0.0, needed - (time.perf_counter() - start)))

        return slow


def size_of(folder):
    return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())


def engine():
    config = AutoConfig.for_model(
        "llama",
        vocab_size=2048,
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=6,
    )
    built = OneDeviceEngine(lambda: random_causal_lm(config), FSDPOptimizerConfig(lr=1e-4))
    built.initialize()
    return built


def batch(rows=8, length=128):
    ids = torch.randint(3, 2000, (rows, length))
    return TensorDict(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(length).expand(rows, -1).clone(),
            "responses": ids[:, length // 2 :],
        },
        batch_size=rows,
    )


def loss(columns, rows):
    return -columns["log_probs"].mean(), {}


@contextmanager
def worker(bytes_per_second, is_async):
    built = CheckpointedWorker()
    built.engine = engine()
    config = replace(CheckpointConfig(), async_save=is_async)
    built.checkpoints = ThrottledDisk(built.engine.module, built.engine, checkpoint_config=config)
    built.checkpoints.bytes_per_second = bytes_per_second
    yield built


def run(options, mode):
    """Seconds of each step, seconds of each save, bytes of a checkpoint. The first save is not
    counted: it allocates the memory that the others use again."""
    commits, steps, saves = Background("commit"), [], []
    with tempfile.TemporaryDirectory() as root, worker(options.rate, mode == "async") as trained:
        store, rows = CheckpointStore(root, fingerprint={}, num_to_keep=1), batch()
        for step in range(options.every + options.steps):
            start = time.perf_counter()
            trained.engine.train_batch(rows, loss, micro_batching=MicroBatching(rows=8))
            trained_at = time.perf_counter()
            if step % options.every == 0:
                save(store, trained, step, commits, mode)
                saves.append(time.perf_counter() - trained_at)
            steps.append(trained_at - start)
        commits.finish()
        size = size_of(root)
    return steps[options.every :], saves[1:], size


def save(store, trained, step, commits, mode):
    commits.finish()
    saving = store.saving(step)
    folder = saving.__enter__()
    receipts = [Path(trained.save_checkpoint(str(folder / "actor"), global_step=step))]

    def commit():
        collect_receipts(receipts, 600)
        saving.__exit__(None, None, None)

    commits.start(commit) if mode == "async" else commit()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes-per-second", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--every", type=int, default=4)
    options = parser.parse_args()
    options.rate = options.megabytes_per_second * 1e6
    torch.manual_seed(0)
    found = {"megabytes_per_second": options.megabytes_per_second, "steps": options.steps}
    for mode in ("sync", "async"):
        steps, saves, size = run(options, mode)
        found["checkpoint_megabytes"] = round(size / 1e6, 1)
        found[mode] = {
            "median_step_seconds": round(median(steps), 4),
            "seconds_blocked_per_save": round(mean(saves), 4),
            "share_of_a_step": round(mean(saves) / median(steps), 4),
        }
    print(json.dumps(found, indent=2))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
