"""What `all.py` measures: every part with its command, its time, and the page of its numbers.

A new measurement is one entry of `PLAN`, and one of `TINY_PLAN`, which runs on a CPU. Letters are
groups; `USUAL` are the tables of docs/performance.md.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

GROWING = "expandable_segments:True"
"""An option of torch's allocator: growing tensors (as in `generate`) need no new blocks. Everything
runs as it comes; TRL, which gains a lot by it, also with the option."""


@dataclass(frozen=True)
class Part:
    """One process of the chain."""

    letter: str
    claim: str
    module: str
    """Of `benchmarks.gpu`, another one by its full name, or the path of a script."""

    arguments: str
    """`{work}` is the folder of files that later parts need, `{out}` the file to write (added where
    no argument names it and `result` is it), `{limit}` the seconds after which it is ended."""

    seconds: int
    """Estimated from the runs in docs/performance.md, starting the process included."""

    allocator: str = ""
    page: str = "docs/performance.md"
    """Where its numbers belong."""

    lane: str = ""
    """Its times mean nothing, so it may run beside other lanes; those of a lane run in order."""

    needs: tuple[str, ...] = ()
    """Files or folders without which it does not begin."""

    result: str = "{out}"
    """The JSON file it leaves; without one the end of what it prints is kept."""


PIECES = ("{work}/smollm2.0", "{work}/smollm2.1")
"""The wheel with a real model in two (scripts/gpu_kit.sh)."""
MODEL, DATA = "{work}/home/models/SmolLM2-135M-Instruct", "{work}/home/data/gsm8k"
GSM8K = "--home {work}/home --out {work}/gsm8k --resume --timeout-seconds {limit}"
"""What is cut short goes on where it ended when the part is run again."""
GPU_TESTS = "tests/models tests/utils tests/workers tests/trainer/test_sft_gpu.py"

PLAN = [
    Part(
        "c", "grpo_step", "grpo_step",
        "--shape 0.5B --rounds 2 --variants base,old_log_probs", 72,
    ),
    Part("d", "trl_step", "trl_step", "--shape 0.5B --steps 3", 118),
    Part("h", "grpo_step", "trainer_step", "--shape 0.5B --steps 4", 60),
    Part("a", "decode", "decode", "--shape 0.5B --repeats 3 --generate-pairs 3", 37),
    Part("b", "train", "train", "--shape 0.5B --rounds 3", 23),
    Part("c", "grpo_step", "grpo_step", "--shape 1.5B --rounds 1 --variants base", 51),
    Part(
        "e", "exact", "grpo_step",
        "--shape 0.5B --variants approximate --rounds 3 --prompts 4", 15,
    ),
    Part("e", "exact", "grpo_step", "--shape 0.5B --variants exact --rounds 3 --prompts 4", 15),
    Part("a", "decode", "decode", "--shape 1.5B --repeats 2", 27),
    Part(
        "c", "grpo_step", "grpo_step",
        "--shape 3B --rounds 1 --variants base --micro-tokens 24576", 62,
    ),
    Part("k", "kernels", "kernels", "--shape 0.5B", 25),
    Part("f", "filtered", "filtered", "--shape 0.5B --new-tokens 64 --rounds 1", 25),
    Part("j", "decode", "decode", "--shape 7B --repeats 1 --new-tokens 128", 30),
    Part("j", "train", "train", "--shape 1.5B --rounds 1", 27),
    Part("i", "trl_step", "trl_step", "--shape 1.5B --steps 2", 130),
    Part("i", "trl_step", "trl_step", "--shape 3B --steps 2 --micro-rows 16", 210),
    Part("l", "trl_step", "trl_step", "--shape 0.5B --steps 2", 80, allocator=GROWING),
    Part(
        "m", "async", "async_steps",
        "--prompts 32 --samples 8 --new-tokens 4096 --steps 8 --sync-steps 8 --staleness 1 3 "
        "--keep",
        415, page="docs/async.md, When it pays",
    ),
    Part("m", "distillation", "distillation", "", 60, page="docs/distillation.md"),
    # A real model learns: twenty-five minutes, so it takes three runs of ten.
    Part(
        "g", "gsm8k", "examples/smollm2/prepare.py", f"--wheel {' '.join(PIECES)} --out {MODEL}",
        40, page="none: the model of the next lines", needs=PIECES, result="",
    ),
    Part("g", "gsm8k", "gsm8k", GSM8K, 500, page="docs/gsm8k.md", needs=(MODEL, DATA),
         result="{work}/gsm8k/page.json"),
    # Long ones, by claim.
    Part(
        "n", "tests", "pytest", f"-q -m gpu -W default -n 8 --dist loadfile {GPU_TESTS}", 240,
        page="none: nothing may fail", lane="tests", result="",
    ),
    Part(
        "n", "agents", "agents",
        "--sessions 512 --oversubscribed 8 --rounds 1 --ways tools instant", 70,
        page="docs/agents.md, What is shown; docs/performance.md, Conversations",
    ),
    Part(
        "n", "agents", "agents",
        "--sessions 2048 --oversubscribed 4 --rounds 1 --ways tools instant --cache-gib 60",
        95, page="docs/agents.md, What is shown; docs/performance.md, Conversations",
    ),
    Part("n", "fp8", "fp8", "--time-limit 140", 140, page="docs/fp8.md"),
    Part("n", "agents", "agents", "--sessions 64 512 --rounds 1", 60,
         page="docs/performance.md, Conversations"),
    Part(
        "n", "board", "benchmarks.board_overhead",
        "--device cuda --steps 41 --shape 0.5B --large-steps 9", 100,
        page="docs/performance.md, The record of a run",
    ),
    Part("n", "stall", "publish_stall", "--shape 0.5B", 110, page="docs/async.md, What is shown"),
    Part(
        "n", "kept_cache", "benchmarks.kept_cache", "--shape 0.5B --device cuda --segment 64", 60,
        page="docs/async.md, Kept keys and values",
    ),
    Part("n", "megatron", "megatron", "--shape 0.5B", 60, page="docs/megatron.md"),
    Part(
        "n", "memory", "memory_estimate", "--cases 0.5B 1.5B 7B-lora", 90,
        page="docs/large_models.md",
    ),
    Part(
        "n", "recipes", "recipes_smollm2",
        f"--model {MODEL} --out {{work}}/recipes --timeout-seconds 280", 300,
        page="recipe/prime/README.md and its siblings, docs/distillation.md", lane="recipes",
        needs=(MODEL,), result="{work}/recipes/recipes_smollm2.json",
    ),
    Part(
        "n", "mutants", "scripts/mutate.py",
        "--count 200 --jobs 12 --deadline-seconds 540 --map {work}/mutants.json --output {out}",
        550, page="CONTRIBUTING.md, the share of planted faults", lane="mutants", result="",
    ),
    Part("n", "experts", "experts", "--time-limit 120", 60, page="docs/experts.md"),
    Part("n", "vision", "vision", "--family qwen2_vl", 30, page="docs/performance.md"),
    Part("n", "vision", "vision", "--family qwen3_vl", 30, page="docs/performance.md"),
]  # fmt: skip
USUAL = "a,b,c,d,e,f,h,k"

TINY = "--shape tiny --device cpu --prompts 4 --samples 2 --prompt-tokens 8 --new-tokens 12"
FEW = "--device cpu --prompts 2 --samples 2"
TINY_PLAN = [
    Part("a", "decode", "decode", f"{TINY} --repeats 1 --generate-pairs 1", 60),
    Part("b", "train", "train", f"{TINY} --rounds 1", 60),
    Part("c", "grpo_step", "grpo_step", f"{TINY} --rounds 1", 60),
    Part("d", "trl_step", "trl_step", f"{TINY} --steps 2 --micro-rows 4", 60),
    Part("e", "exact", "grpo_step", f"{TINY} --rounds 1 --variants approximate", 60),
    Part("e", "exact", "grpo_step", f"{TINY} --rounds 1 --variants exact", 60),
    Part("f", "filtered", "filtered", f"{TINY} --rounds 1", 60),
    Part("h", "grpo_step", "trainer_step", f"{TINY} --steps 2", 60),
    Part("k", "kernels", "kernels", f"{TINY} --micro-tokens 64", 60),
    Part(
        "m", "async", "async_steps",
        f"--shape tiny {FEW} --prompt-tokens 6 --new-tokens 24 --median 3 --steps 2 --sync-steps 2 "
        "--staleness 1", 90,
    ),
    Part("m", "distillation", "distillation", f"{TINY} --teacher tiny --rounds 1", 60),
    Part("g", "gsm8k", "gsm8k", f"{GSM8K} --device cpu --tiny", 300, needs=(MODEL, DATA),
         result="{work}/gsm8k/page.json"),
    Part("n", "tests", "pytest", "-q tests/algos/test_kl.py", 60, lane="tests", result=""),
    Part(
        "n", "agents", "agents",
        "--shape tiny --device cpu --sessions 4 --oversubscribed 2 --turns 2 --turn-tokens 4 "
        "--reply-tokens 3 --prompt-tokens 6 --tool-seconds 0.01 --cache-gib 1 --rounds 1 "
        "--ways tools instant", 60,
    ),
    Part("n", "fp8", "fp8",
         f"--shapes tiny {FEW} --prompt-tokens 6 --new-tokens 8 --rounds 1", 60),
    Part(
        "n", "agents", "agents",
        "--shape tiny --device cpu --sessions 2 4 --turns 2 --turn-tokens 4 --reply-tokens 3 "
        "--prompt-tokens 6 --tool-seconds 0.01 --cache-gib 1 --rounds 1", 60,
    ),
    Part(
        "n", "board", "benchmarks.board_overhead",
        f"{TINY} --alternate --quickstart-prompts 4 --steps 5 --large-steps 5", 90,
    ),
    Part(
        "n", "stall", "publish_stall",
        f"--shape tiny {FEW} --prompt-tokens 6 --new-tokens 400 --updates 3 --between 3 "
        "--pause-seconds 0.01", 60,
    ),
    Part(
        "n", "kept_cache", "benchmarks.kept_cache",
        f"--shape tiny {FEW} --ages 2 --segment 4 --rates 1e-3", 60,
    ),
    Part("n", "megatron", "megatron", f"{TINY} --rounds 1", 60),
    Part("n", "memory", "memory_estimate",
         f"{FEW} --cases tiny tiny-lora --prompt-tokens 6 --new-tokens 8", 60),
    Part(
        "n", "mutants", "scripts/mutate.py",
        "--count 2 --jobs 1 --only verl/algos/kl --tests tests/algos/test_kl.py "
        "--deadline-seconds {limit} --map {work}/mutants.json --output {out}", 200,
        lane="mutants", result="",
    ),
    Part(
        "n", "recipes", "recipes_smollm2",
        f"--model {MODEL} --out {{work}}/recipes --device cpu --prompts 4 --steps 2 "
        "--settings data.max_prompt_length=192", 120,
        lane="recipes", needs=(MODEL,), result="{work}/recipes/recipes_smollm2.json",
    ),
    Part(
        "n", "experts", "experts",
        f"--shape tiny {FEW} --tokens 64 --length 16 --rows 8 --prompt-tokens 6 --new-tokens 8 "
        "--rounds 1", 60,
    ),
    Part("n", "vision", "vision",
         "--device cpu --layers 2 --hidden 128 --prompts 4 --samples 1 --tokens 4", 60),
]  # fmt: skip


def beside_each_other(plan: Sequence[Part]) -> Iterator[list[list[Part]]]:
    """Lanes to run together: timed parts alone, and those between two of them by their lane."""
    for in_lanes, parts in itertools.groupby(plan, lambda part: bool(part.lane)):
        lanes: dict[Any, list[Part]] = {}
        for number, part in enumerate(parts):
            lanes.setdefault(part.lane or number, []).append(part)
        if in_lanes:
            yield list(lanes.values())
        else:
            yield from ([lane] for lane in lanes.values())


def expected_seconds(plan: Sequence[Part]) -> int:
    """By the estimates, the longest of lanes that run beside each other."""
    return sum(
        max(sum(part.seconds for part in lane) for lane in lanes)
        for lanes in beside_each_other(plan)
    )
