"""What the controller itself costs: microseconds of its CPU per worker and step.

    python benchmarks/controller.py [--output benchmarks/results/controller.json] [--quick]

The first part uses simulated workers that answer at once, so only the controller's own work is
measured: cutting a batch over a mesh, handing out the parts, collecting and joining the answers.
The second part measures real calls: in this process, to child processes and to Ray actors.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from verl import DataProto
from verl.single_controller import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup
from verl.single_controller.base.backend import Backend, Call, Outcome, RankCall
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.single_controller.base.failures import Failure
from verl.single_controller.local import LocalWorkerGroup

AIM_MICROSECONDS = 50.0
PACKAGES = ("numpy", "ray", "tensordict", "torch")
COLUMNS = ("input_ids", "attention_mask", "position_ids", "old_log_probs", "advantages", "returns")


class Role(Worker):
    """A training role: reads six columns, returns a number per row and metrics."""

    def __init__(self) -> None:
        super().__init__()
        self._register_dispatch_collect_info("actor", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"), columns=COLUMNS)
    def update(self, batch: DataProto) -> DataProto:
        return answer_for(batch)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ping(self) -> int:
        return self.rank


def answer_for(batch: DataProto) -> DataProto:
    return DataProto.from_dict(
        {"loss": torch.zeros(len(batch))}, meta_info={"metrics": {"actor/loss": 0.0}}
    )


class SimulatedBackend(Backend):
    """Every rank answers at once, without having looked at its arguments."""

    reference_type = int

    def __init__(self, world_size: int, answer: DataProto) -> None:
        super().__init__()
        self.workers = list(range(world_size))
        self.answer = answer
        self.answers: list[Any] = []

    def submit(self, call: Call, method: str, rank_calls: Sequence[RankCall]) -> list[Any]:
        values = {"_query_dispatch_info": lambda rank: rank, "_query_collect_info": lambda _: True}
        value = values.get(method, lambda _: self.answer)
        self.answers = [Outcome(value(rank_call.rank)) for rank_call in rank_calls]
        return [rank_call.rank for rank_call in rank_calls]

    def wait(self, references: Sequence[Any], timeout_seconds: float) -> list[int]:
        return list(range(len(references)))

    def outcomes(self, references: Sequence[Any]) -> list[Outcome]:
        return [self.answers[rank] for rank in references]

    def stopped_ranks(self, ranks: Sequence[int]) -> list[int]:
        return []

    def stack_of(self, rank: int) -> str:
        return ""

    def deaths(self) -> dict[int, Failure]:
        return {}

    def label(self, rank: int) -> str:
        return f"rank {rank}"

    def shutdown(self) -> None:
        self.is_closed.set()


class SimulatedWorkerGroup(WorkerGroup):
    def __init__(self, world_size: int, answer: DataProto) -> None:
        super().__init__(
            ResourcePool([world_size]),
            backend=SimulatedBackend(world_size, answer),
            worker_class=Role,
            name="simulated",
        )


def batch_of(rows: int, tokens: int) -> DataProto:
    """A batch that takes no memory: each column is one number seen many times."""
    tensors = {name: torch.zeros(1, 1).expand(rows, tokens) for name in (*COLUMNS, "responses")}
    return DataProto.from_dict(tensors, {"uid": np.arange(rows), "raw_prompt": np.arange(rows)})


def cpu_seconds(call: Callable[[], Any], repeats: int) -> float:
    call()
    spent = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        spent.append(time.process_time() - start)
    return statistics.median(spent)


def simulated(world_size: int, rows_per_worker: int, tokens: int, repeats: int) -> dict[str, Any]:
    group = SimulatedWorkerGroup(world_size, answer_for(batch_of(rows_per_worker, 1)))
    batch = batch_of(world_size * rows_per_worker, tokens)
    seconds = cpu_seconds(lambda: group.update(batch), repeats)  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "workers": world_size,
        "rows": len(batch),
        "tokens_per_row": tokens,
        "us_per_worker": 1e6 * seconds / world_size,
        "us_per_row": 1e6 * seconds / len(batch),
    }


def wall_latency(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    call()
    spent = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        spent.append(1e6 * (time.perf_counter() - start))
    spent.sort()
    return {"median_us": statistics.median(spent), "p90_us": spent[int(0.9 * len(spent))]}


def measured(name: str, group: Any, repeats: int) -> dict[str, Any]:
    batch = DataProto.from_dict({key: torch.zeros(64, 1024) for key in COLUMNS})  # 1.5 MB
    result = {
        "backend": name,
        "workers": group.world_size,
        "ping": wall_latency(group.ping, repeats),
        "update_1.5MB": wall_latency(lambda: group.update(batch), max(3, repeats // 5)),
    }
    group.shutdown()
    return result


def real_backends(repeats: int) -> list[dict[str, Any]]:
    spec = ClassWithInitArgs(Role)
    results = [
        measured("this process", LocalWorkerGroup(None, spec), repeats),
        measured("child processes", LocalWorkerGroup(ResourcePool([2]), spec), repeats),
    ]
    try:
        import ray
    except ImportError:
        return results
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    results.append(
        measured("ray actors", RayWorkerGroup(pool, RayClassWithInitArgs(Role)), repeats)
    )
    ray.shutdown()
    return results


def show(costs: list[dict[str, Any]], latencies: list[dict[str, Any]]) -> None:
    table = Table(title="controller CPU per step (simulated workers)")
    for name in ("workers", "rows", "tokens per row", "us per worker", "us per row"):
        table.add_column(name, justify="right")
    for cost in costs:
        table.add_row(
            *(str(cost[key]) for key in ("workers", "rows", "tokens_per_row")),
            f"{cost['us_per_worker']:.1f}",
            f"{cost['us_per_row']:.1f}",
        )
    calls = Table(title="wall time of a real call, median (p90)")
    for name in ("back-end", "workers", "ping us", "update 1.5 MB us"):
        calls.add_column(name, justify="right")
    for row in latencies:
        spans = (row["ping"], row["update_1.5MB"])
        texts = [f"{span['median_us']:.0f} ({span['p90_us']:.0f})" for span in spans]
        calls.add_row(row["backend"], str(row["workers"]), *texts)
    Console().print(table, calls)


def package_versions() -> dict[str, str]:
    installed = {item.metadata["Name"].lower(): item.version for item in distributions()}
    return {name: installed[name] for name in PACKAGES if name in installed}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=None, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="few repeats, simulated workers only")
    options = parser.parse_args()
    repeats = 3 if options.quick else 11
    costs = [
        simulated(world_size, rows_per_worker, tokens, repeats)
        for world_size in (8, 64, 512, 2048)
        for rows_per_worker in (1, 8)
        for tokens in (128, 32768)
    ]
    latencies = [] if options.quick else real_backends(repeats=50)
    show(costs, latencies)
    worst = max(cost["us_per_worker"] for cost in costs)
    if options.output is not None:
        report = {
            "command": " ".join(["python", *sys.argv]),
            "versions": {"python": platform.python_version(), **package_versions()},
            "machine": {"cpus": os.cpu_count(), "processor": platform.processor()},
            "aim_us_per_worker": AIM_MICROSECONDS,
            "worst_us_per_worker": worst,
            "simulated": costs,
            "real": latencies,
        }
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"worst {worst:.1f} us per worker-step; the aim is at most {AIM_MICROSECONDS:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
