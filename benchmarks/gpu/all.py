"""Every GPU measurement in one command, in at most ten minutes on an H200.

    python benchmarks/gpu/all.py --out DIR [--only a,c] [--add] [--trl build/trl] [--seconds 590]

    a  decode      generation beside its floor and beside `generate`
    b  train       forward, backward, optimizer; prompts computed once per group and once per row
    c  grpo_step   the whole step by phase, and what each option costs
    d  trl_step    the same step in TRL, whose packages are in a folder of their own
    e  exact       the step with equal bits in rollout and training, on a small workload: with few
                   rows there are sums that cuBLAS would split
    f  filtered    what top-k, top-p and a repetition penalty cost in generation
    h  grpo_step   the step of the real command, `main_ppo`
    k  kernels     where the time of a training step goes

and, when asked for,

    i  trl_step    TRL with larger models
    j  decode, train   generation with a model of 7B, training of one with 1.5B
    l  trl_step    TRL with an option of the allocator

Each line of the plan is a process of its own, one after the other, so that none finds another's
memory. DIR gets one JSON per name above with all its runs, written after each of them; with
`--add`, what DIR has of other lines stays. At the end the tables are printed. What fails is
reported and the rest goes on; the exit code is then 1. What would not be done in time by its
estimate is left out and named.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that it runs as a script

from benchmarks.gpu.summary import summarise  # noqa: E402

GROWING = "expandable_segments:True"
"""An option of torch's allocator: growing tensors (as in `generate`) need no new blocks. Everything
runs as it comes; TRL, which gains a lot by it, also with the option."""


@dataclass(frozen=True)
class Part:
    """One process of the chain."""

    letter: str
    claim: str
    module: str
    arguments: str
    seconds: int
    """Estimated from the runs in docs/performance.md, starting the process included."""

    allocator: str = ""


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
]  # fmt: skip
USUAL = "a,b,c,d,e,f,h,k"

TINY = "--shape tiny --device cpu --prompts 4 --samples 2 --prompt-tokens 8 --new-tokens 12"
TINY_PLAN = [
    Part("a", "decode", "decode", f"{TINY} --repeats 1 --generate-pairs 1", 20),
    Part("b", "train", "train", f"{TINY} --rounds 1", 20),
    Part("c", "grpo_step", "grpo_step", f"{TINY} --rounds 1", 20),
    Part("d", "trl_step", "trl_step", f"{TINY} --steps 2 --micro-rows 4", 30),
    Part("e", "exact", "grpo_step", f"{TINY} --rounds 1 --variants approximate", 20),
    Part("e", "exact", "grpo_step", f"{TINY} --rounds 1 --variants exact", 20),
    Part("f", "filtered", "filtered", f"{TINY} --rounds 1", 20),
    Part("h", "grpo_step", "trainer_step", f"{TINY} --steps 2", 40),
    Part("k", "kernels", "kernels", f"{TINY} --micro-tokens 64", 20),
]


class Chain:
    """Runs parts one after the other and keeps what they found."""

    def __init__(self, out: Path, seconds: float, trl: Path, *, adds: bool = False) -> None:
        self.out, self.trl = out, trl
        self.begin = time.monotonic()
        self.end = self.begin + seconds
        self.runs: dict[str, list[dict[str, Any]]] = {}
        for path in sorted(out.glob("*.json")) if adds else []:
            kept = json.loads(path.read_text())
            self.runs[kept["claim"]] = kept["runs"]

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    def run(self, part: Part) -> None:
        name = f"{part.claim} {part.arguments}"
        left = self.end - time.monotonic()
        if part.seconds > left:
            if not self.is_known(part):
                self.keep(part, {"status": "left out", "reason": f"{left:.0f} s were left"})
            self.say(f"left out (needs about {part.seconds} s, {left:.0f} s are left): {name}")
            return
        self.say(f"begins, about {part.seconds} s: {name}")
        start = time.monotonic()
        found = self.child(part, left)
        found["wall_seconds"] = time.monotonic() - start
        self.keep(part, found)
        self.say(f"{found['status']} after {found['wall_seconds']:.0f} s: {name}")

    def child(self, part: Part, left: float) -> dict[str, Any]:
        """Run the part's process. If it fails, what it had written by then is kept too."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "result.json"
            command = [sys.executable, "-m", f"benchmarks.gpu.{part.module}", "--out", str(path)]
            command += part.arguments.split()
            try:
                done = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=self.environment(part),
                    stderr=subprocess.PIPE,
                    text=True,
                    timeout=left,
                )
                reason = "" if done.returncode == 0 else done.stderr
            except subprocess.TimeoutExpired:
                reason = f"not done after {left:.0f} s"
            found = json.loads(path.read_text()) if path.exists() else {}
        reason = reason.replace(f"{ROOT}/", "")
        if reason:
            print(reason[-3000:], flush=True)
            return {"status": "failed", "reason": reason[-3000:], **found}
        return {"status": "done", **found}

    def environment(self, part: Part) -> dict[str, str]:
        variables = {"HF_HUB_OFFLINE": "1", **os.environ}
        if part.allocator:
            variables["PYTORCH_CUDA_ALLOC_CONF"] = part.allocator
        if part.module == "trl_step":
            own = variables.get("PYTHONPATH", "")
            variables["PYTHONPATH"] = f"{self.trl.resolve()}{os.pathsep}{own}"
        return variables

    def is_known(self, part: Part) -> bool:
        """Whether an earlier chain has measured it."""
        return any(run["status"] == "done" for run in self.runs_of(part))

    def runs_of(self, part: Part) -> list[dict[str, Any]]:
        return [
            run
            for run in self.runs.get(part.claim, [])
            if (run["arguments"], run.get("allocator", "")) == (part.arguments, part.allocator)
        ]

    def keep(self, part: Part, found: dict[str, Any]) -> None:
        runs = self.runs.setdefault(part.claim, [])
        runs[:] = [run for run in runs if run not in self.runs_of(part)]
        runs.append({"arguments": part.arguments, "allocator": part.allocator, **found})
        text = json.dumps({"claim": part.claim, "runs": runs}, indent=1)
        (self.out / f"{part.claim}.json").write_text(text + "\n")

    def failures(self) -> list[str]:
        return [
            f"{claim} {run['arguments']}"
            for claim, runs in self.runs.items()
            for run in runs
            if run["status"] == "failed"
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=USUAL, help="letters of the parts to run")
    parser.add_argument("--add", action="store_true", help="keep what DIR has of other parts")
    parser.add_argument("--trl", type=Path, default=ROOT / "build/trl")
    parser.add_argument("--seconds", type=float, default=590.0)
    parser.add_argument("--tiny", action="store_true", help="try it on a CPU")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    letters = options.only.split(",")
    plan = [part for part in (TINY_PLAN if options.tiny else PLAN) if part.letter in letters]
    chain = Chain(options.out, options.seconds, options.trl, adds=options.add)
    chain.say(f"{len(plan)} parts, about {sum(part.seconds for part in plan)} s in all")
    for part in plan:
        chain.run(part)
    print(summarise(options.out))
    failures = chain.failures()
    chain.say(f"failed: {'; '.join(failures)}" if failures else "nothing failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
