"""Every GPU measurement in one command, for a machine that is there for ten minutes at a time.

    python benchmarks/gpu/all.py --out DIR [--only a,c] [--add] [--trl build/trl] [--seconds 590]
    python benchmarks/gpu/all.py --out DIR --take FOLDER ...    (what other machines have measured)

Without `--only`, the tables of docs/performance.md:

    a  decode      generation beside its floor and beside `generate`
    b  train       forward, backward, optimizer; prompts computed once per group and once per row
    c  grpo_step   the whole step by phase, and what each option costs
    d  trl_step    the same step in TRL, whose packages are in a folder of their own
    e  exact       the step with equal bits in rollout and training, on a small workload: with few
                   rows there are sums that cuBLAS would split
    f  filtered    what top-k, top-p and a repetition penalty cost in generation
    h  grpo_step   the step of the real command, `main_ppo`
    k  kernels     where the time of a training step goes

when asked for,

    i  trl_step    TRL with larger models
    j  decode, train   generation with a model of 7B, training of one with 1.5B
    l  trl_step    TRL with an option of the allocator
    m  async, distillation   longer ones
    g  gsm8k       the commands of docs/gsm8k.md on a real model: three times ten minutes
    n  the rest, best by claim: tests, agents, fp8, board, stall, memory, recipes, mutants, ...

`--only` takes letters and names of claims.

Each line of the plan is a process of its own, so that none finds another's memory. Timed ones run
alone, one after the other; tests, learning curves and mutants run beside each other, a lane each.
DIR gets one JSON per claim with all its runs, written after each of them. With `--add`, what DIR
has of other lines stays and what is done there is not run again, unless `--only` names it. At the
end the tables are printed, then what is measured and what is left. What fails is reported and the
rest goes on; the exit code is then 1. What would not be done in time by its estimate is left out
and named, and so is what needs a file that is not there.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that it runs as a script

from benchmarks.gpu.plan import (  # noqa: E402
    PLAN,
    TINY_PLAN,
    USUAL,
    Part,
    beside_each_other,
    expected_seconds,
)
from benchmarks.gpu.summary import summarise  # noqa: E402


class Chain:
    """Runs parts and keeps what they found."""

    def __init__(
        self, out: Path, seconds: float, trl: Path, *, work: Path | None = None, adds: bool = False
    ) -> None:
        self.out, self.trl, self.work = out, trl, work or out
        self.begin = time.monotonic()
        self.end = self.begin + seconds
        self.lock = Lock()
        self.runs: dict[str, list[dict[str, Any]]] = {}
        if adds:
            self.take(out)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    def run_all(self, plan: Sequence[Part]) -> None:
        for lanes in beside_each_other(plan):
            with ThreadPoolExecutor(len(lanes)) as pool:
                list(pool.map(self.run_lane, lanes))  # raises what a lane has raised

    def run_lane(self, lane: Sequence[Part]) -> None:
        for part in lane:
            self.run(part)

    def run(self, part: Part) -> None:
        name = f"{part.claim} {part.arguments}"
        left = self.end - time.monotonic()
        missing = [path for path in map(self.filled, part.needs) if not Path(path).exists()]
        reason = f"needs {', '.join(missing)}".replace(f"{ROOT}/", "") if missing else ""
        if part.seconds > left:
            reason = f"needs about {part.seconds} s, {left:.0f} s were left"
        if reason:
            if not self.is_done(part):
                self.keep(part, {"status": "left out", "reason": reason})
            self.say(f"left out ({reason}): {name}")
            return
        self.say(f"begins, about {part.seconds} s: {name}")
        start = time.monotonic()
        found = self.child(part, min(left, 2 * part.seconds + 30))
        found["wall_seconds"] = time.monotonic() - start
        self.keep(part, found)
        self.say(f"{found['status']} after {found['wall_seconds']:.0f} s: {name}")

    def child(self, part: Part, limit: float) -> dict[str, Any]:
        """Run the part's process. If it fails, what it had written by then is kept too."""
        with tempfile.TemporaryDirectory() as folder:
            out, log = Path(folder) / "result.json", Path(folder) / "log.txt"
            words = part.arguments.split()
            if part.result == "{out}" and "{out}" not in words:
                words += ["--out", "{out}"]
            places = {"out": out, "limit": max(1, int(limit - 10))}
            command = [*start_of(part.module), *(self.filled(word, **places) for word in words)]
            result = Path(self.filled(part.result, **places))
            if part.result:
                result.unlink(missing_ok=True)  # of an earlier run
            with log.open("w") as output:
                reason = ended(command, self.environment(part), output, limit)
            printed = log.read_text(errors="replace").replace(f"{ROOT}/", "")[-3000:]
            found = {"printed": printed}
            if part.result:
                found = json.loads(result.read_text()) if result.exists() else {}
        if reason:
            print(printed, flush=True)
            return {"status": "failed", "reason": f"{printed}\n{reason}".strip(), **found}
        return {"status": "done", **found}

    def filled(self, text: str, **places: Any) -> str:
        return text.format(work=self.work.resolve(), **places)

    def environment(self, part: Part) -> dict[str, str]:
        kernels = str(self.work.resolve() / "triton")  # compiled once, whatever the part calls home
        variables = {"HF_HUB_OFFLINE": "1", "TRITON_CACHE_DIR": kernels, **os.environ}
        if part.allocator:
            variables["PYTORCH_CUDA_ALLOC_CONF"] = part.allocator
        if part.lane:
            variables.setdefault("OMP_NUM_THREADS", "2")
        if part.module == "trl_step":
            own = variables.get("PYTHONPATH", "")
            variables["PYTHONPATH"] = f"{self.trl.resolve()}{os.pathsep}{own}"
        return variables

    def is_done(self, part: Part) -> bool:
        """Whether an earlier chain has measured it."""
        return any(run["status"] == "done" for run in self.runs_of(part))

    def runs_of(self, part: Part) -> list[dict[str, Any]]:
        return [run for run in self.runs.get(part.claim, []) if key_of(run) == key_of(vars(part))]

    def keep(self, part: Part, found: dict[str, Any]) -> None:
        run = {"arguments": part.arguments, "allocator": part.allocator, **found}
        with self.lock:
            self.keep_run(part.claim, run)

    def keep_run(self, claim: str, run: dict[str, Any]) -> None:
        """In place of an earlier run with the same arguments."""
        runs = self.runs.setdefault(claim, [])
        runs[:] = [other for other in runs if key_of(other) != key_of(run)]
        runs.append(run)
        text = json.dumps({"claim": claim, "runs": runs}, indent=1)
        (self.out / f"{claim}.json").write_text(text + "\n")

    def take(self, folder: Path) -> None:
        """Keep what another chain has measured; its failures only where nothing else is known."""
        for path in sorted(folder.glob("*.json")):
            kept = json.loads(path.read_text())
            for run in kept["runs"]:
                known = [key_of(other) for other in self.runs.get(kept["claim"], [])]
                if run["status"] == "done" or key_of(run) not in known:
                    self.keep_run(kept["claim"], run)

    def failures(self) -> list[str]:
        return [
            f"{claim} {run['arguments']}"
            for claim, runs in self.runs.items()
            for run in runs
            if run["status"] == "failed"
        ]

    def progress(self, plan: Sequence[Part]) -> str:
        """What is measured and what is left, in Markdown."""
        lines = ["| letter | measurement | state | page |", "|---|---|---|---|"]
        for part in plan:
            state = "not run"
            for run in self.runs_of(part):
                took = f" in {run['wall_seconds']:.0f} s" if "wall_seconds" in run else ""
                last = run.get("reason", "").strip().rpartition("\n")[2]
                state = f"**{run['status']}**{took}{f': {last[:80]}' if last else ''}"
            name = f"{part.claim}: {part.module} {part.arguments}"
            lines.append(f"| {part.letter} | `{name[:90]}` | {state} | {part.page} |")
        return "\n".join(lines) + "\n"


def key_of(run: Mapping[str, Any]) -> tuple[str, str]:
    return run["arguments"], run.get("allocator", "")


def start_of(module: str) -> list[str]:
    """The first words of a part's command."""
    if module.endswith(".py"):
        return [sys.executable, str(ROOT / module)]
    is_full = "." in module or module == "pytest"
    return [sys.executable, "-m", module if is_full else f"benchmarks.gpu.{module}"]


def ended(command: list[str], variables: dict[str, str], output: TextIO, limit: float) -> str:
    """Run a command and all that it starts for so long at most; why it failed, if it did."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    try:
        status = process.wait(limit)
        return f"exit status {status}" if status else ""
    except subprocess.TimeoutExpired:
        return f"not done after {limit:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing is left of the group
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help="letters and claims of the parts to run, done or not")
    parser.add_argument("--add", action="store_true", help="go on from what DIR has")
    parser.add_argument("--take", type=Path, nargs="+", default=[], help="add results; run nothing")
    parser.add_argument("--work", type=Path, default=ROOT / "build", help="files of several parts")
    parser.add_argument("--trl", type=Path, default=ROOT / "build/trl")
    parser.add_argument("--seconds", type=float, default=590.0)
    parser.add_argument("--tiny", action="store_true", help="try it on a CPU")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    adds = options.add or bool(options.take)
    chain = Chain(options.out, options.seconds, options.trl, work=options.work, adds=adds)
    for folder in options.take:
        chain.take(folder)
    whole = TINY_PLAN if options.tiny else PLAN
    names = set((options.only or USUAL).split(","))
    plan = [part for part in whole if {part.letter, part.claim} & names]
    if options.add and not options.only:
        plan = [part for part in plan if not chain.is_done(part)]
    if not options.take:
        chain.say(f"{len(plan)} parts, about {expected_seconds(plan)} s in all")
        chain.run_all(plan)
    print(summarise(options.out))
    print(chain.progress(whole if options.take else plan))
    failures = chain.failures()
    chain.say(f"failed: {'; '.join(failures)}" if failures else "nothing failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
