"""How fast one GPU trains: forward and backward over packed sequences, and the optimizer.

python benchmarks/gpu/train.py [--shape 0.5B] [--fuse]
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).parent))
from shapes import ceilings, random_model

from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.fuse import fuse_model
from verl.utils.flops_counter import FlopsCounter
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.one_device import OneDeviceEngine


def rows(num_rows, prompt_tokens, response_tokens):
    ids = torch.randint(10, 150000, (num_rows, prompt_tokens + response_tokens))
    return TensorDict(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(ids.shape[1]).expand_as(ids).contiguous(),
            "responses": ids[:, prompt_tokens:],
            "advantages": torch.randn(num_rows, response_tokens),
        },
        batch_size=num_rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="0.5B")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--micro-tokens", type=int, default=32768)
    parser.add_argument("--fuse", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("train.json"))
    options = parser.parse_args()
    fused: list[str] = []

    def build():
        model = random_model(options.shape)
        fused.extend(fuse_model(model) if options.fuse else [])
        return model

    engine = OneDeviceEngine(
        build, FSDPOptimizerConfig(lr=1e-6), gradient_checkpointing=options.checkpointing
    )
    engine.initialize()
    data = rows(options.rows, 256, 512).to("cuda")
    micro = MicroBatching(tokens=options.micro_tokens)

    def loss(columns, batch):
        return -(columns["log_probs"] * batch["advantages"]).sum() / data["responses"].numel(), {}

    def timed(run):
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return times

    training = timed(lambda: engine.train_batch(data, loss, micro_batching=micro))
    inference = timed(lambda: engine.infer_batch(data, micro_batching=micro))
    num_tokens = data["input_ids"].numel()
    lengths = [data["input_ids"].shape[1]] * options.rows
    flops = FlopsCounter(engine.module.config)
    best = statistics.median(training[1:])
    result = {
        "shape": options.shape,
        "fused": fused,
        "tokens": num_tokens,
        "train_seconds": training,
        "infer_seconds": inference,
        "train_tokens_per_second": num_tokens / best,
        "infer_tokens_per_second": num_tokens / statistics.median(inference[1:]),
        "mfu": flops.utilisation(lengths, best),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "ceilings": ceilings(),
    }
    print(json.dumps(result, indent=1))
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
