"""How fast weights travel to a rollout engine, with all checks on.

    python -m benchmarks.weight_sync --output benchmarks/results/weight_sync.json

First the hash alone, beside blake2b over the same bytes; on a GPU too, if there is one. Then whole
updates: cut into buckets, checked, applied, and both sides' content hashed and compared. Between
processes the receiver is a child of this one, and the number is the sender's alone. A plain `copy_`
of the same tensors is the ceiling. Gigabytes per second of CPU time on one thread, best of the
repeats; a GPU's work is waited for on the wall clock.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.controller import package_versions
from verl.workers.weight_sync import (
    ReceivingChannel,
    SendingChannel,
    WeightReceiver,
    WeightSender,
    copy_weights,
    receive_weights,
    send_weights,
)
from verl.workers.weight_sync.bucket import byte_view, content_hash
from verl.workers.weight_sync.shared_memory import SharedMemoryReceiver, SharedMemorySender
from verl.workers.weight_sync.tcp import TcpListener, TcpSender

GIGABYTE = 1e9
NUM_TENSORS = 16
TOKEN = secrets.token_hex(16)
LIMIT_SECONDS = 120.0


def model(megabytes: int) -> dict[str, Tensor]:
    """Equal matrices in bf16."""
    rows = megabytes * 2**20 // NUM_TENSORS // 2 // 1024
    return {f"layer.{i}": torch.randn(rows, 1024).bfloat16() for i in range(NUM_TENSORS)}


def gigabytes(weights: dict[str, Tensor]) -> float:
    return sum(len(byte_view(tensor)) for tensor in weights.values()) / GIGABYTE


def seconds(
    work: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.process_time
) -> float:
    work()
    spent = []
    for _ in range(repeats):
        start = clock()
        work()
        spent.append(clock() - start)
    return min(spent)


def hash_speeds(weights: dict[str, Tensor], repeats: int) -> dict[str, float]:
    tensor = torch.cat([part.view(-1) for part in weights.values()])
    size = gigabytes({"all": tensor})
    content = tensor.view(torch.uint8).numpy().tobytes()
    speeds = {
        "content_hash_cpu": size / seconds(lambda: content_hash(tensor), repeats),
        "blake2b": size / seconds(lambda: hashlib.blake2b(content).digest(), repeats),
    }
    if torch.cuda.is_available():
        on_gpu = tensor.cuda()
        spent = seconds(lambda: content_hash(on_gpu), repeats, time.perf_counter)
        speeds["content_hash_cuda"] = size / spent
    return speeds


def in_process(weights: dict[str, Tensor], bucket_bytes: int, repeats: int) -> dict[str, float]:
    targets = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    sender, receiver = WeightSender(bucket_bytes), WeightReceiver(targets)
    versions = iter(range(10**6))

    def plain_copy() -> None:
        for name, tensor in weights.items():
            targets[name].copy_(tensor)

    size = gigabytes(weights)
    return {
        "copy_without_checks": size / seconds(plain_copy, repeats),
        "in_process": size
        / seconds(lambda: copy_weights(sender, weights.items(), next(versions), receiver), repeats),
    }


def between_processes(
    weights: dict[str, Tensor],
    bucket_bytes: int,
    repeats: int,
    open_sender: Callable[[], SendingChannel],
    open_receiver: Callable[[], ReceivingChannel],
) -> float:
    """From this process to a child: gigabytes per second of the sender's CPU time."""
    child = multiprocessing.get_context("fork").Process(
        target=receive, args=(weights, repeats, open_receiver)
    )
    child.start()
    try:
        channel, sender = open_sender(), WeightSender(bucket_bytes)
        versions = iter(range(10**6))
        spent = seconds(
            lambda: send_weights(sender, weights.items(), next(versions), channel), repeats
        )
        child.join(LIMIT_SECONDS)
    finally:
        child.kill()
    return gigabytes(weights) / spent


def receive(
    weights: dict[str, Tensor], repeats: int, open_receiver: Callable[[], ReceivingChannel]
) -> None:
    torch.set_num_threads(1)
    channel = open_receiver()
    receiver = WeightReceiver({name: torch.zeros_like(part) for name, part in weights.items()})
    for _ in range(repeats + 1):  # the first is not counted
        receive_weights(receiver, channel)


def channels(weights: dict[str, Tensor], bucket_bytes: int, repeats: int) -> dict[str, float]:
    near, far = multiprocessing.Pipe()
    listener = TcpListener(TOKEN)
    address = (listener.host, listener.port)

    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "shared_memory": (
            lambda: SharedMemorySender([near]),
            lambda: SharedMemoryReceiver(far),
        ),
        "tcp_loopback": (
            lambda: TcpSender([address], TOKEN),
            lambda: listener.accept(max_bucket_bytes=bucket_bytes),
        ),
    }
    return {
        name: between_processes(weights, bucket_bytes, repeats, *pair)
        for name, pair in pairs.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=None, help="where to write the JSON")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the model")
    parser.add_argument("--bucket-megabytes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)  # forked children can use no more
    weights, bucket_bytes = model(options.megabytes), options.bucket_megabytes * 2**20
    speeds = {
        **hash_speeds(weights, options.repeats),
        **in_process(weights, bucket_bytes, options.repeats),
        **channels(weights, bucket_bytes, options.repeats),
    }
    for name, speed in speeds.items():
        print(f"{name:24s} {speed:8.2f} GB per CPU second")
    if options.output is not None:
        report = {
            "command": " ".join(["python -m benchmarks.weight_sync", *sys.argv[1:]]),
            "versions": {"python": platform.python_version(), **package_versions()},
            "machine": {"cpus": os.cpu_count(), "threads_per_process": 1},
            "model_megabytes": options.megabytes,
            "bucket_megabytes": options.bucket_megabytes,
            "gigabytes_per_cpu_second": {name: round(speed, 3) for name, speed in speeds.items()},
        }
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
