"""What the data plane costs: put, get and wake, by payload, consumers and number of workers.

    python benchmarks/data_plane.py [--backends in_process,ray,transfer_queue] [--quick]
                                    [--output benchmarks/results/data_plane.json]

Payload: one producer puts a group (ids, mask and log-probs of 8 to 256 rows of 1024 tokens), a
consumer gets it; on Ray both are this process: the columns pass through the object store, or the
storage units of TransferQueue, and back. Bar: put + get of a group of 256 x 1024 tokens, p50 at
most 2 ms.

Wake: a consumer waits for a key in a thread of its own; the time from the start of `put` to its
return there. Bar: 10 ms.

Workers are simulated: coroutines of this process (8 to 8,192), each of which waits for a key of its
own or takes from a common queue with the others, while one producer puts a small entry per worker.
On Ray all of them are calls that wait in one metadata actor, as those of 8,192 processes would be.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import threading
import time
import uuid
from collections.abc import Callable
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from verl.data_plane import DataPlane, Limits, Ready, create

ROWS, TOKENS = (8, 64, 256), 1024
WORKERS = (8, 64, 512, 2048, 8192)
LONG = 600.0
BAR_PUT_GET_MS, BAR_WAKE_MS = 2.0, 10.0
PACKAGES = ("ray", "torch", "TransferQueue")


def group(rows: int) -> dict[str, Any]:
    return {
        "input_ids": torch.randint(0, 150_000, (rows, TOKENS)),
        "response_mask": torch.ones(rows, TOKENS, dtype=torch.int64),
        "rollout_log_probs": torch.rand(rows, TOKENS),
    }


def milliseconds(samples: list[float]) -> dict[str, float]:
    ordered = sorted(1000 * sample for sample in samples)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"p50": round(statistics.median(ordered), 4), "p99": round(p99, 4), "n": len(ordered)}


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def payload(plane: DataPlane, rows: int, repeats: int) -> dict[str, Any]:
    columns, puts, gets, both = group(rows), [], [], []
    for number in range(repeats + 2):
        key = f"payload/{number}"
        puts.append(timed(lambda key=key: plane.put(key, columns)))
        gets.append(timed(lambda key=key: plane.get([key])))
        both.append(puts[-1] + gets[-1])
        plane.delete([key])
    size = sum(column.numel() * column.element_size() for column in columns.values())
    return {
        "rows": rows,
        "tokens": TOKENS,
        "megabytes": round(size / 2**20, 2),
        "put_ms": milliseconds(puts[2:]),
        "get_ms": milliseconds(gets[2:]),
        "put_get_ms": milliseconds(both[2:]),
    }


def consumers(plane: DataPlane, num_consumers: int, repeats: int) -> dict[str, Any]:
    """Threads that all get the same group at once: seconds of each get."""
    plane.put("shared/0", group(64))
    seconds: list[float] = []

    def consume() -> None:
        seconds.extend(timed(lambda: plane.get(["shared/0"])) for _ in range(repeats))

    threads = [threading.Thread(target=consume) for _ in range(num_consumers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    plane.delete(["shared/0"])
    return {"consumers": num_consumers, "rows": 64, "get_ms": milliseconds(seconds)}


def wake(plane: Any, repeats: int) -> dict[str, float]:
    columns, seconds = {"x": torch.arange(8)}, []
    for number in range(repeats + 2):
        key, woken = f"wake/{number}", []

        def sleeper(key: str = key, woken: list[float] = woken) -> None:
            plane.wait(Ready(keys=(key,)), LONG)
            woken.append(time.perf_counter())

        thread = threading.Thread(target=sleeper)
        thread.start()
        while not plane.num_waiting:
            time.sleep(0.0005)
        start = time.perf_counter()
        plane.put(key, columns)
        thread.join(LONG)
        seconds.append(woken[0] - start)
        plane.delete([key])
    return milliseconds(seconds[2:])


async def crowd(plane: Any, num_workers: int) -> dict[str, Any]:
    """Each worker waits for its key; the time from the start of its put until it runs again."""
    started: dict[int, float] = {}

    async def worker(number: int) -> float:
        await plane.wait_async(Ready(keys=(f"crowd/{number}",)), LONG)
        return time.perf_counter() - started[number]

    async def taker() -> str:
        (receipt,) = await plane.take_async("trainer", 1, "crowd", LONG)
        return receipt.key

    tasks = [asyncio.create_task(worker(number)) for number in range(num_workers)]
    takers = [asyncio.create_task(taker()) for _ in range(num_workers)]
    await asyncio.sleep(0)
    while await asyncio.to_thread(lambda: plane.num_waiting) < 2 * num_workers:
        await asyncio.sleep(0.01)
    before = await asyncio.to_thread(lambda: plane.num_wakes)
    columns, puts = {"x": torch.arange(8)}, []

    def produce() -> None:
        for number in range(num_workers):
            started[number] = time.perf_counter()
            plane.put(f"crowd/{number}", columns)
            puts.append(time.perf_counter() - started[number])

    begin = time.perf_counter()
    await asyncio.to_thread(produce)
    wakes = await asyncio.gather(*tasks)
    taken = await asyncio.gather(*takers)
    seconds = time.perf_counter() - begin
    assert len(set(taken)) == num_workers  # each entry was given to one taker
    woken = await asyncio.to_thread(lambda: plane.num_wakes) - before
    assert woken == 2 * num_workers  # and nobody woke up in vain
    await asyncio.to_thread(plane.delete, [f"crowd/{number}" for number in range(num_workers)])
    return {
        "workers": num_workers,
        "put_ms": milliseconds(puts),
        "wake_ms": milliseconds(wakes),
        "entries_per_second": round(num_workers / seconds),
        "wakes_per_waiter": woken / (2 * num_workers),
    }


def measured(backend: str, *, is_quick: bool) -> dict[str, Any]:
    options = {"transfer_queue": {"backend": {"SimpleStorage": {"num_data_storage_units": 2}}}}
    plane = create(backend, f"bench-{uuid.uuid4().hex[:8]}", Limits(), options.get(backend))
    repeats = 10 if is_quick else 200
    workers = WORKERS[:2] if is_quick else WORKERS
    found = {
        "payload": [payload(plane, rows, repeats) for rows in ROWS],
        "consumers": [consumers(plane, n, max(repeats // n, 3)) for n in (1, 4, 16)],
        "wake_ms": wake(plane, repeats),
        "workers": [asyncio.run(crowd(plane, number)) for number in workers],
    }
    plane.close()
    put_get, woken = found["payload"][-1]["put_get_ms"]["p50"], found["wake_ms"]["p50"]
    found["bars"] = {
        f"put + get of 256 x 1024 <= {BAR_PUT_GET_MS:g} ms": put_get <= BAR_PUT_GET_MS,
        f"wake <= {BAR_WAKE_MS:g} ms": woken <= BAR_WAKE_MS,
    }
    print(f"{backend}: put + get {put_get} ms, wake {woken} ms; {found['bars']}")
    for one in found["workers"]:
        print(f"  {one['workers']} workers: put {one['put_ms']}, wake {one['wake_ms']}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--backends", default="in_process,ray")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    backends = arguments.backends.split(",")
    if backends != ["in_process"]:
        import ray

        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    if "transfer_queue" in backends and find_spec("transfer_queue") is None:
        raise SystemExit('needs the package: pip install "verl[transfer_queue]"')
    versions = {one.name: one.version for one in distributions() if one.name in PACKAGES}
    result: dict[str, Any] = {
        "command": f"python benchmarks/data_plane.py --backends {arguments.backends}",
        "machine": {"cores": os.cpu_count(), "platform": platform.platform(), **versions},
        "backends": {},
    }
    for backend in backends:
        load = round(os.getloadavg()[0], 1)
        result["backends"][backend] = {"load_at_start": load}
        result["backends"][backend] |= measured(backend, is_quick=arguments.quick)
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
