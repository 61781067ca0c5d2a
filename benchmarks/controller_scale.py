"""How the controller scales: one training step over 8 to 8192 simulated workers.

    python -m benchmarks.controller_scale --output benchmarks/results/controller_scale.json

The workers do not exist; all that the controller does for them does. Every argument is packed and
every answer unpacked with the codec of the local back-end's pipes, so that bytes and CPU time are
real. A step is: generate (two rows per worker, heavy-tailed lengths), balance by length, update.
Batches are padded, as the trainer's are. All times are CPU seconds of the controller's one thread;
it never waits here.

Two ways for the rows to travel: `payload`, through the controller; `by reference`, from worker to
worker, while the controller sees lengths and rewards only. Then 1% of the workers die: how long
until a step names them, and until it has been repeated on new workers.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.controller import package_versions
from verl import DataProto
from verl.single_controller import ResourcePool, Worker, WorkerGroup
from verl.single_controller.base.backend import Backend, Call, Outcome, RankCall
from verl.single_controller.base.decorator import (
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.single_controller.base.failures import Failure, WorkerDied
from verl.single_controller.base.futures import by_reference
from verl.single_controller.local.payload import Payload
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

WORKERS = (8, 64, 512, 2048, 8192)
ROWS_PER_WORKER = 2
PROMPT_TOKENS = 128
MEDIAN_RESPONSE_TOKENS = 256
MAX_RESPONSE_TOKENS = 2048
DISTINCT_WORKERS = 64
"""Lengths are drawn for so many workers; beyond, they repeat. Memory stays bounded that way."""

COLUMNS = ("input_ids", "attention_mask", "position_ids", "old_log_probs", "advantages", "returns")
DEAD_SHARE, KILLED = 0.01, Failure("killed by signal 9", is_death=True)
MESH = make_nd_compute_dataproto_dispatch_fn("actor")


class Role(Worker):
    """Only its registrations matter: the methods never run."""

    @register(dispatch_mode=MESH)
    def generate(self, prompts: DataProto) -> DataProto:
        raise NotImplementedError

    @register(dispatch_mode=MESH, blocking=False)
    def generate_here(self, prompts: DataProto) -> DataProto:
        raise NotImplementedError

    @register(dispatch_mode=MESH, columns=COLUMNS)
    def update(self, batch: DataProto) -> DataProto:
        raise NotImplementedError


class Reference:
    """Stands for a batch that lies at a rank."""

    def __init__(self, rank: int, answer: Any = None, failure: Failure | None = None) -> None:
        self.rank = rank
        self.answer = answer
        self.failure = failure

    def __reduce__(self) -> tuple[Any, ...]:
        return Reference, (self.rank,)


class PackingBackend(Backend):
    """Ranks that answer at once; what goes to them and comes from them is packed and counted."""

    reference_type = Reference

    def __init__(self, answers: dict[str, list[Payload]], world_size: int) -> None:
        super().__init__()
        self.workers = list(range(world_size))
        self.answers = answers
        self.num_bytes = 0
        self.dead: set[int] = set()
        self.submitted_at = 0.0

    def submit(self, call: Call, method: str, rank_calls: Sequence[RankCall]) -> list[Any]:
        sizes: dict[int, int] = {}  # by identity: what ranks share is packed once
        for _, args, kwargs in rank_calls:
            for value in (*args, *kwargs.values()):
                if id(value) not in sizes:
                    sizes[id(value)] = len(Payload.of(value, method).content)
                self.num_bytes += sizes[id(value)]
        self.submitted_at = time.process_time()
        return [self.start(method, rank_call.rank) for rank_call in rank_calls]

    def start(self, method: str, rank: int) -> Reference:
        if rank in self.dead:
            return Reference(rank, failure=KILLED)
        if method in ("_query_dispatch_info", "_query_collect_info"):
            return Reference(rank, rank if method == "_query_dispatch_info" else True)
        return Reference(rank, self.answers[method][rank])

    def wait(self, references: Sequence[Any], timeout_seconds: float) -> list[int]:
        return list(range(len(references)))

    def outcomes(self, references: Sequence[Any]) -> list[Outcome]:
        return [self.outcome(reference) for reference in references]

    def outcome(self, reference: Reference) -> Outcome:
        if not isinstance(reference.answer, Payload):
            return Outcome(reference.answer, reference.failure)
        self.num_bytes += len(reference.answer.content)
        return Outcome(reference.answer.unpickle())

    def stopped_ranks(self, ranks: Sequence[int]) -> list[int]:
        return []

    def stack_of(self, rank: int) -> str:
        return ""

    def deaths(self) -> dict[int, Failure]:
        return dict.fromkeys(sorted(self.dead), KILLED)

    def label(self, rank: int) -> str:
        return f"rank {rank}"

    def shutdown(self) -> None:
        self.is_closed.set()


class Simulation:
    """A group of workers, what they will answer, and the two ways to make a step."""

    def __init__(self, world_size: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.world_size = world_size
        self.num_rows = world_size * ROWS_PER_WORKER
        self.prompts = DataProto.from_dict({"prompts": torch.zeros(self.num_rows, PROMPT_TOKENS)})
        distinct = [response_lengths(rng) for _ in range(min(world_size, DISTINCT_WORKERS))]
        rollouts = [Payload.of(rollout_of(lengths), "a rollout") for lengths in distinct]
        known = [Payload.of(known_of(lengths), "what is known of it") for lengths in distinct]
        repeats = world_size // len(distinct)
        trained = DataProto.from_dict(
            {"loss": torch.zeros(ROWS_PER_WORKER)}, meta_info={"metrics": {"actor/loss": 0.0}}
        )
        self.answers = {
            "generate": rollouts * repeats,
            "generate_here": [Payload.of(None, "never fetched")] * world_size,
            "execute_with_func_generator": known * repeats,
            "update": [Payload.of(trained, "metrics")] * world_size,
        }
        self.restart()

    def restart(self) -> None:
        """New workers."""
        self.backend = PackingBackend(self.answers, self.world_size)
        self.group: Any = WorkerGroup(
            ResourcePool([self.world_size]),
            backend=self.backend,
            worker_class=Role,
            name="simulated",
        )

    def balanced_order(self, lengths: Sequence[int]) -> list[int]:
        parts = get_seqlen_balanced_partitions(lengths, self.world_size, equal_size=True)
        return [row for part in parts for row in part]

    def step_with_payload(self) -> float:
        """One step with the rows in the controller; seconds to hand the update out."""
        batch = self.group.generate(self.prompts)
        batch.reorder(self.balanced_order(batch.batch["attention_mask"].sum(-1).tolist()))
        return self.fan_out(batch)

    def step_by_reference(self) -> float:
        """One step with the rows at the workers; seconds to hand the update out."""
        future = self.group.generate_here(self.prompts)
        batch = by_reference(self.group, future, describe)
        order = self.balanced_order(batch.known.batch["length"].tolist())
        return self.fan_out(batch.take(order))

    def fan_out(self, batch: Any) -> float:
        start = time.process_time()
        self.group.update(batch)
        return self.backend.submitted_at - start


def describe(worker: Any, part: DataProto) -> DataProto:
    raise NotImplementedError  # runs on workers, and there are none


def response_lengths(rng: np.random.Generator) -> np.ndarray:
    lengths = rng.lognormal(np.log(MEDIAN_RESPONSE_TOKENS), 1.0, ROWS_PER_WORKER)
    return np.minimum(lengths, MAX_RESPONSE_TOKENS).astype(np.int64)


def rollout_of(lengths: np.ndarray) -> DataProto:
    """Padded to the longest response there may be, as batches are."""
    mask = torch.arange(PROMPT_TOKENS + MAX_RESPONSE_TOKENS) < torch.as_tensor(
        PROMPT_TOKENS + lengths[:, None]
    )
    return DataProto.from_dict({name: mask.float() for name in COLUMNS})


def known_of(lengths: np.ndarray) -> DataProto:
    return DataProto.from_dict(
        {"length": torch.as_tensor(PROMPT_TOKENS + lengths), "reward": torch.zeros(len(lengths))}
    )


def measure(simulation: Simulation, step: Callable[[], float], repeats: int) -> dict[str, Any]:
    step()  # the group asks its ranks once who they are
    cpu, fan_out = [], []
    simulation.backend.num_bytes = 0
    for _ in range(repeats):
        start = time.process_time()
        fan_out.append(step())
        cpu.append(time.process_time() - start)
    seconds = statistics.median(cpu)
    return {
        "workers": simulation.world_size,
        "rows": simulation.num_rows,
        "cpu_seconds_per_step": seconds,
        "cpu_us_per_worker": 1e6 * seconds / simulation.world_size,
        "bytes_per_row": simulation.backend.num_bytes / repeats / simulation.num_rows,
        "fan_out_seconds": statistics.median(fan_out),
        **recovery(simulation, step),
    }


def recovery(simulation: Simulation, step: Callable[[], float]) -> dict[str, float]:
    """A step with 1% of the ranks dead: time until they are named, and until it is repeated."""
    num_dead = max(1, round(DEAD_SHARE * simulation.world_size))
    simulation.backend.dead = set(range(0, num_dead * 7, 7)) if num_dead > 1 else {0}
    start = time.process_time()
    try:
        step()
    except WorkerDied:
        named = time.process_time()
    else:
        raise AssertionError("a step went through although ranks are dead")
    simulation.restart()
    step()
    return {"named_seconds": named - start, "recovered_seconds": time.process_time() - start}


def slope(rows: Sequence[dict[str, Any]]) -> float:
    """CPU microseconds of a step per worker: the line through 0 that fits best."""
    workers = np.array([row["workers"] for row in rows], dtype=float)
    seconds = np.array([row["cpu_seconds_per_step"] for row in rows])
    return 1e6 * float(workers @ seconds / (workers @ workers))


def transfer_queue_note() -> str:
    if importlib.util.find_spec("transfer_queue") is None:
        return "skipped: the package TransferQueue is not installed"
    return "skipped: rows travel through the controller or by reference; there is no third way yet"


def show(results: dict[str, list[dict[str, Any]]]) -> None:
    keys = ("workers", "cpu_us_per_worker", "bytes_per_row", "fan_out_seconds")
    keys += ("named_seconds", "recovered_seconds")
    for transport, rows in results.items():
        table = Table(title=transport)
        for key in keys:
            table.add_column(key.replace("_", " "), justify="right")
        for row in rows:
            table.add_row(*(f"{row[key]:.4g}" for key in keys))
        Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=None, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="up to 64 workers, one repeat")
    options = parser.parse_args()
    repeats = 1 if options.quick else 5
    results: dict[str, list[dict[str, Any]]] = {"payload": [], "by reference": []}
    for world_size in WORKERS[:2] if options.quick else WORKERS:
        simulation = Simulation(world_size)
        results["payload"].append(measure(simulation, simulation.step_with_payload, repeats))
        results["by reference"].append(measure(simulation, simulation.step_by_reference, repeats))
    show(results)
    slopes = {transport: slope(rows) for transport, rows in results.items()}
    for transport, microseconds in slopes.items():
        print(f"{transport}: {microseconds:.0f} us per worker and step")
    print(f"TransferQueue {transfer_queue_note()}")
    if options.output is not None:
        report = {
            "command": "python -m benchmarks.controller_scale --output " + str(options.output),
            "versions": {"python": platform.python_version(), **package_versions()},
            "machine": {"cpus": os.cpu_count(), "torch_threads": torch.get_num_threads()},
            "rows_per_worker": ROWS_PER_WORKER,
            "padded_tokens_per_row": PROMPT_TOKENS + MAX_RESPONSE_TOKENS,
            "transports": results,
            "us_per_worker": slopes,
            "transfer_queue": transfer_queue_note(),
        }
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
