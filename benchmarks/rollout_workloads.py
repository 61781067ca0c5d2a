"""How fast the built-in engine generates on a CPU, beside transformers' `generate` and vLLM.

    python benchmarks/rollout_workloads.py
    VLLM_PYTHON=/path/to/python python benchmarks/rollout_workloads.py  # vLLM too

One model of the Llama shape with random weights (48M parameters), fp32, three kinds of work:

    mixed    64 prompts of 16 to 128 tokens, responses of 16 to 96 tokens
    groups    8 prompts of 96 tokens, 8 samples each, 64 tokens
    uniform  64 prompts of 32 tokens, 64 tokens each: nothing to gain from scheduling

Lengths are forced (end-of-sequence is ignored), so that all engines have the same tokens to give;
tokens that `generate` computes after a sequence has its length do not count. All engines sample at
temperature 1; ours returns log-probabilities, `generate` does not. Runs alternate A B, B A, A B
and so on, after one warm-up each. The table shows medians; ratios are of medians in the same run.
CPU seconds tell more than the clock where the machine is shared. Everything goes to
`benchmarks/results/rollout_workloads.json`.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from verl.models.loading import random_causal_lm
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine

RESULTS = Path(__file__).parent / "results" / "rollout_workloads.json"
VARIABLES = ("OMP_WAIT_POLICY", "MKL_CBWR")
"""What else decides how fast matrix products are."""

SHAPE = {
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Work:
    """Prompts and how many tokens to give to each of their samples."""

    name: str
    prompts: list[list[int]]
    num_tokens: list[int]
    num_samples: int = 1

    @property
    def total_tokens(self) -> int:
        return self.num_samples * sum(self.num_tokens)


@dataclass
class Timing:
    """All runs of one engine on one kind of work; first is the warm-up."""

    engine: str
    work: str
    tokens: int
    warm_up_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / statistics.median(self.seconds)

    @property
    def tokens_per_cpu_second(self) -> float:
        return self.tokens / statistics.median(self.cpu_seconds)


Run = Callable[[Work], tuple[float, float]]
"""Does the work and tells how long it took: seconds, CPU seconds."""


# ---- the work ------------------------------------------------------------------------------------


def all_work() -> list[Work]:
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(3, SHAPE["vocab_size"]) for _ in range(length)]

    return [
        Work(
            "mixed",
            [prompt(rng.randint(16, 128)) for _ in range(64)],
            [rng.randint(16, 96) for _ in range(64)],
        ),
        Work("groups", [prompt(96) for _ in range(8)], [64] * 8, num_samples=8),
        Work("uniform", [prompt(32) for _ in range(64)], [64] * 64),
    ]


# ---- the engines ---------------------------------------------------------------------------------


def clocked(generate: Callable[[Work], int]) -> Run:
    """Measure a function that does the work and gives the number of tokens that count."""

    def run(work: Work) -> tuple[float, float]:
        start, cpu_start = time.perf_counter(), time.process_time()
        num_tokens = generate(work)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        if num_tokens != work.total_tokens:
            raise RuntimeError(f"{num_tokens} tokens came back instead of {work.total_tokens}")
        return seconds, cpu_seconds

    return run


def ours(model: PreTrainedModel) -> Run:
    limits = EngineLimits(max_num_seqs=64, max_prompt_tokens=128, max_response_tokens=128)
    engine = NativeEngine(model, limits, eos_token_ids=[2])

    def generate(work: Work) -> int:
        requests = [
            GenerationRequest(
                request_id=str(number),
                prompt_ids=prompt,
                params=SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=number),
                num_samples=work.num_samples,
            )
            for number, (prompt, num_tokens) in enumerate(
                zip(work.prompts, work.num_tokens, strict=True)
            )
        ]
        outputs = engine.generate_batch(requests)
        return sum(len(output.log_probs) for samples in outputs for output in samples)

    return clocked(generate)


def transformers_generate(model: PreTrainedModel) -> Run:
    """One padded batch of all rows, the usual attention of transformers."""
    twin = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **SHAPE), attn_implementation="sdpa"
    )
    twin.load_state_dict(model.state_dict())
    twin.eval()

    @torch.no_grad()
    def generate(work: Work) -> int:
        width, longest = max(map(len, work.prompts)), max(work.num_tokens)
        ids = torch.tensor([[0] * (width - len(p)) + p for p in work.prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in work.prompts])
        output = twin.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=work.num_samples,
        )
        assert output.shape == (len(work.prompts) * work.num_samples, width + longest)
        return work.num_samples * sum(min(n, output.shape[1] - width) for n in work.num_tokens)

    return clocked(generate)


class VLLM:
    """vLLM in a process and an environment of its own; a line of JSON in, a line out."""

    def __init__(self, python: str, model: PreTrainedModel, folder: str) -> None:
        model.save_pretrained(folder)
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name("rollout_vllm.py")), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = str(self._answer()["version"])

    def __call__(self, work: Work) -> tuple[float, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(work)) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        if answer["num_tokens"] != work.total_tokens:
            raise RuntimeError(f"vLLM gave {answer['num_tokens']} tokens, not {work.total_tokens}")
        return answer["seconds"], answer["cpu_seconds"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def _answer(self) -> dict:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("RESULT "):  # vLLM may print as well
                return json.loads(line.removeprefix("RESULT "))
        raise RuntimeError(f"vLLM ended with exit code {self.process.wait(timeout=60)}")


# ---- the clock -----------------------------------------------------------------------------------


def measure(engines: dict[str, Run], work: Work, num_pairs: int) -> list[Timing]:
    timings = {name: Timing(name, work.name, work.total_tokens) for name in engines}
    for name, run in engines.items():
        timings[name].warm_up_seconds, _ = run(work)
    for pair in range(num_pairs):
        for name in list(engines) if pair % 2 == 0 else reversed(list(engines)):
            seconds, cpu_seconds = engines[name](work)
            timings[name].seconds.append(seconds)
            timings[name].cpu_seconds.append(cpu_seconds)
    return list(timings.values())


# ---- the report ----------------------------------------------------------------------------------


def ratios(timings: list[Timing]) -> dict[str, dict[str, dict[str, float]]]:
    """work -> other engine -> how many times as fast ours is, by the clock and by CPU time."""
    mine = {timing.work: timing for timing in timings if timing.engine == "verl"}
    result: dict[str, dict[str, dict[str, float]]] = {work: {} for work in mine}
    for timing in timings:
        if timing.engine != "verl":
            own = mine[timing.work]
            result[timing.work][timing.engine] = {
                "clock": own.tokens_per_second / timing.tokens_per_second,
                "cpu": own.tokens_per_cpu_second / timing.tokens_per_cpu_second,
            }
    return result


def show(timings: list[Timing], console: Console) -> None:
    table = Table("work", "engine", "tokens", "tokens/s", "per CPU s", "ours is", "by CPU time")
    speedups = ratios(timings)
    for timing in timings:
        speedup = speedups[timing.work].get(timing.engine)
        table.add_row(
            timing.work,
            timing.engine,
            f"{timing.tokens:,}",
            f"{timing.tokens_per_second:,.0f}",
            f"{timing.tokens_per_cpu_second:,.0f}",
            f"{speedup['clock']:.2f}x" if speedup else "",
            f"{speedup['cpu']:.2f}x" if speedup else "",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    kinds = [work.name for work in all_work()]
    parser.add_argument("--work", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--pairs", type=int, default=5, help="runs of each engine, at least 5")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # for the other process
    console = Console()
    model = random_causal_lm(AutoConfig.for_model("llama", **SHAPE))
    engines: dict[str, Run] = {"verl": ours(model), "transformers": transformers_generate(model)}
    versions = {name: version(name) for name in ("torch", "transformers")}
    with tempfile.TemporaryDirectory() as folder:
        vllm_python = os.environ.get("VLLM_PYTHON")
        vllm = VLLM(vllm_python, model, folder) if vllm_python else None
        if vllm is None:
            console.print("without vLLM: VLLM_PYTHON is not set")
        else:
            engines["vllm"], versions["vllm"] = vllm, vllm.version
        load = [os.getloadavg()]
        timings: list[Timing] = []
        for work in all_work():
            if work.name in options.work:
                timings += measure(engines, work, options.pairs)
                load.append(os.getloadavg())
        if vllm is not None:
            vllm.close()
    show(timings, console)
    report = {
        "command": "python " + " ".join(["benchmarks/rollout_workloads.py", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), **versions},
        "threads": options.threads,
        "cores": os.cpu_count(),
        "environment": {name: os.environ.get(name, "") for name in VARIABLES},
        "load_average": load,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "shape": SHAPE,
        "ratios": ratios(timings),
        "timings": [asdict(timing) for timing in timings],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"written to {options.output}")


if __name__ == "__main__":
    main()
