"""What each rollout engine costs on a CPU: start, memory, tokens per second, new weights.

    python -m benchmarks.rollout
    python -m benchmarks.rollout --vllm-python /path/to/env/bin/python     # vLLM too

Engines are those of `rollout.name`, made by the factory that the trainer uses: `native` and `hf`
generate with a module in their caller's process, `native_process` and `vllm` have processes of
their own. Each is held by a fresh Python (`rollout_engine_worker.py`), so that its start and its
memory are its own; all hold the same Llama of 48M random weights in fp32.

    1, 16, 64    requests at once: a prompt of 64 tokens, 32 tokens of response, temperature 1

Runs of the engines alternate (A B C, C B A, ...) after one warm-up each; medians are shown. CPU
seconds are those of the holder and all its processes, and tell more than the clock where the
machine is shared. Memory is the most that was resident, in the engine's processes alone where it
has its own, else in its caller's as well. An update of the weights sends all of them and compares
fingerprints; engines on a shared module have nothing to send.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from benchmarks.rollout_workloads import SHAPE
from examples.quickstart.build_model import build_tokenizer
from verl.models.loading import random_causal_lm

RESULTS = Path(__file__).parent / "results" / "rollout.json"
WORKER = "benchmarks.rollout_engine_worker"
SIZES = (1, 16, 64)
NUM_UPDATES = 3
END_SECONDS = 60


@dataclass
class Measured:
    """All that is known of one engine; seconds and CPU seconds by number of requests."""

    name: str
    version: str
    start_seconds: float
    seconds: dict[int, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[int, list[float]] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    update_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def rate(self, size: int, *, by_cpu: bool) -> float:
        seconds = self.cpu_seconds if by_cpu else self.seconds
        return self.tokens[size] / statistics.median(seconds[size])


class Holder:
    """A process that holds one engine; a line of JSON in, a line out."""

    def __init__(self, name: str, model: str, python: str | None) -> None:
        command = [sys.executable, "-m", WORKER, name, model, *([python] if python else [])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        facts = self._answer()
        self.measured = Measured(name, facts["version"], facts["start_seconds"])

    def work(self, size: int, *, counts: bool) -> None:
        answer = self.ask(requests=size)
        if counts:
            self.measured.tokens[size] = answer["tokens"]
            self.measured.seconds.setdefault(size, []).append(answer["seconds"])
            self.measured.cpu_seconds.setdefault(size, []).append(answer["cpu_seconds"])
            self.measured.peak_bytes = answer["peak_bytes"]

    def update(self) -> None:
        seconds = self.ask(update=True)["seconds"]
        if seconds is not None:
            self.measured.update_seconds.append(seconds)

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=END_SECONDS)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        raise RuntimeError(f"the holder ended with {self.process.wait(timeout=END_SECONDS)}")


def save_model(folder: str) -> int:
    """The model and a tokenizer for it; how many parameters it has."""
    model = random_causal_lm(AutoConfig.for_model("llama", **SHAPE))
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def measure(holders: list[Holder], num_rounds: int) -> None:
    for size in SIZES:
        for holder in holders:
            holder.work(size, counts=False)
        for number in range(num_rounds):
            for holder in holders if number % 2 == 0 else reversed(holders):
                holder.work(size, counts=True)
    for _ in range(NUM_UPDATES):
        for holder in holders:
            holder.update()


def table_of(engines: list[Measured]) -> Table:
    columns = ["engine", "start, s", "memory, MB", "new weights, s"]
    columns += [f"{size} at once" for size in SIZES]
    columns += [f"{size}, per CPU s" for size in SIZES]
    table = Table(*columns)
    for one in engines:
        update = f"{statistics.median(one.update_seconds):.2f}" if one.update_seconds else "none"
        table.add_row(
            f"{one.name} {one.version}",
            f"{one.start_seconds:.1f}",
            f"{one.peak_bytes / 1e6:,.0f}",
            update,
            *(f"{one.rate(size, by_cpu=False):,.0f}" for size in SIZES),
            *(f"{one.rate(size, by_cpu=True):,.0f}" for size in SIZES),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # for all processes
    names = ["native", "native_process", "hf"] + ["vllm"] * bool(options.vllm_python)
    load = [os.getloadavg()]
    holders: list[Holder] = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        num_parameters = save_model(folder)
        try:
            for name in names:
                python = options.vllm_python if name == "vllm" else None
                holders.append(Holder(name, folder, python))
            measure(holders, options.rounds)
        finally:
            for holder in holders:
                holder.close()
    load.append(os.getloadavg())
    engines = [holder.measured for holder in holders]
    console = Console(width=140)
    console.print(table_of(engines))
    report = {
        "command": "python " + " ".join(["-m benchmarks.rollout", *sys.argv[1:]]),
        "note": options.note,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
        },
        "threads": options.threads,
        "cores": os.cpu_count(),
        "load_average": load,
        "parameters": num_parameters,
        "wall_seconds": time.perf_counter() - start,
        "engines": [vars(engine) for engine in engines],
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"written to {options.output}")


if __name__ == "__main__":
    main()
