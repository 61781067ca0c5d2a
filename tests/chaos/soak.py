"""`make soak`: a run to which everything happens must end as one to which nothing happens.

    1. struck      the toy task on two ranks, each with an engine in a process of its own, rewards
                   in worker processes (code in sandboxes, grading over HTTP), saves in the
                   background. At random moments kill -9 hits the controller, a rank, an engine, a
                   fork server, a reward worker, a sandbox or the grading service; the disk is full
                   or slow for a while; the wall clock steps. A dead controller is started again.
    2. stopped     SIGTERM; then two more steps, resumed.
    3. undisturbed as many steps in another folder.

The last checkpoints and the metrics of all steps must be equal bit for bit, nothing may be left of
any process, and memory, descriptors, threads and shared memory of the undisturbed run may not grow.
"""

import argparse
import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.chaos.shim import Control, built, environment
from tests.chaos.soak_run import REPOSITORY, REWARD, Run, Service, below, kind_of, processes
from tests.toy import make_toy

STALL_SECONDS = 240.0
FIND_SECONDS = 8.0
KINDS = (
    *("controller", "rank", "fork server of ranks", "engine"),
    *("reward worker", "fork server of rewards", "sandbox"),
)
SLOPES = {"memory_mb": 24.0, "descriptors": 6.0, "threads": 6.0, "shared_mb": 8.0}
"""How much each may grow over the second half of the undisturbed run."""


def slope_of(times: list[float], values: list[float]) -> float:
    """Growth per second by least squares."""
    return float(np.polyfit(times, values, 1)[0]) if len(set(times)) > 1 else 0.0


@dataclass
class Soak:
    minutes: float
    folder: Path
    rng: random.Random
    events: list[dict[str, Any]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def go(self) -> bool:
        """Whether everything held."""
        self.folder.mkdir(parents=True, exist_ok=True)
        toy = self.folder / "toy"
        if not toy.exists():
            toy.mkdir()
            make_toy(toy)
        self.service = Service()
        (toy / "reward.py").write_text(REWARD.format(port=self.service.port))
        self.control = Control(self.folder / "control")
        folder = self.folder / "struck"
        shim = environment(built(self.folder), folder / "checkpoints", control=self.control)
        self.struck = Run(toy, folder, shim)
        self.calm = Run(toy, self.folder / "undisturbed", {})
        self.begin = time.monotonic()
        try:
            self.strike_for(0.6 * 60 * self.minutes)
            num_steps = self.stop_and_resume()
            self.undisturbed(num_steps)
            self.compare(num_steps)
            self.check_slopes()
        finally:
            for run in (self.struck, self.calm):
                if run.process is not None and run.code() is None:
                    run.process.kill()
                    run.process.wait(timeout=30)
            self.service.close()
        self.report()
        return not self.violations

    # ---- strikes ---------------------------------------------------------------------------------

    def strike_for(self, seconds: float) -> None:
        run, end = self.struck, time.monotonic() + seconds
        run.launch(10**6)
        moved_at, last = time.monotonic(), 0
        next_strike = math.inf  # until it has begun
        while time.monotonic() < end:
            time.sleep(0.5)
            run.look()
            if run.code() is not None:
                self.replace(run)
            if run.last_step() != last:
                moved_at, last = time.monotonic(), run.last_step()
                next_strike = min(next_strike, moved_at + self.rng.uniform(0.0, 4.0))
            if time.monotonic() - moved_at > STALL_SECONDS:
                self.violations.append(f"no step for {STALL_SECONDS:g} s after step {last}")
                return
            if time.monotonic() > next_strike:
                self.strike()
                # Most strikes wait for the next step, some hit what has just begun to recover.
                is_early = self.rng.random() < 0.2
                pause = self.rng.uniform(2.0, 20.0) if is_early else math.inf
                next_strike = time.monotonic() + pause
        self.control.set()

    def strike(self) -> None:
        """Do what was done least often so far."""
        deeds: dict[str, Callable[[], bool]] = {
            **{f"kill -9 {kind}": lambda kind=kind: self.kill(kind) for kind in KINDS},
            "kill -9 grading service": self.service.strike,
            "full disk": lambda: self.for_a_while(4.0, is_full=True),
            "slow disk": lambda: self.for_a_while(6.0, slow_seconds=0.05),
            "clock step": self.step_clock,
        }
        done = Counter(event["what"] for event in self.events)
        fewest = min(done[what] for what in deeds)
        what = self.rng.choice([what for what in deeds if done[what] == fewest])
        if deeds[what]():
            self.note(what)

    def kill(self, kind: str) -> bool:
        """Some live only for moments, so it may take a while to find one."""
        controller, end = self.struck.pid, time.monotonic() + FIND_SECONDS
        while time.monotonic() < end:
            everyone = processes()
            found = [one.pid for one in below(controller, everyone)]
            found = [pid for pid in found if kind_of(everyone[pid], controller, everyone) == kind]
            with suppress(ProcessLookupError):  # it has just ended
                if found or kind == "controller":
                    os.kill(self.rng.choice(found or [controller]), signal.SIGKILL)
                    return True
        return False

    def step_clock(self) -> bool:
        self.control.set(clock_seconds=self.rng.choice((-3600.0, 3600.0, 86400.0)))
        return True

    def for_a_while(self, seconds: float, **faults: Any) -> bool:
        self.control.set(**faults)
        threading.Timer(seconds, self.control.set).start()
        return True

    def note(self, what: str) -> None:
        seconds = time.monotonic() - self.begin
        self.events.append({"what": what, "at": seconds, "step": self.struck.last_step()})
        print(f"{seconds:7.1f} s  step {self.struck.last_step():4d}  {what}", flush=True)

    def replace(self, run: Run) -> None:
        """The controller has ended: nobody else may be left, and the same command goes on."""
        if run.code() != -signal.SIGKILL:
            self.violations.append(f"the struck run ended by itself with code {run.code()}")
        left = run.left()
        if left:
            self.violations.append(f"left of a dead run: {left}")
        run.launch(10**6)

    # ---- the end ---------------------------------------------------------------------------------

    def stop_and_resume(self) -> int:
        run = self.struck
        self.await_step(run)  # a signal while it still imports would end it at once
        run.process.send_signal(signal.SIGTERM)
        self.finish(run, "the struck run, asked to stop,")
        num_steps = run.committed() + 2
        run.launch(num_steps)
        self.finish(run, "the resumed run")
        return num_steps

    def await_step(self, run: Run) -> None:
        """Wait until the life that runs now has made a step."""
        if run.code() is not None:
            self.replace(run)
        last, end = run.last_step(), time.monotonic() + STALL_SECONDS
        while run.last_step() == last and run.code() is None and time.monotonic() < end:
            time.sleep(0.5)
            run.look()

    def undisturbed(self, num_steps: int) -> None:
        self.note(f"undisturbed run of {num_steps} steps")
        self.calm.launch(num_steps)
        self.finish(self.calm, "the undisturbed run")

    def finish(self, run: Run, name: str) -> None:
        """Wait for the end; too long without a step is a violation."""
        moved_at, last = time.monotonic(), -1
        while run.code() is None:
            time.sleep(0.5)
            run.look()
            if run.last_step() != last:
                moved_at, last = time.monotonic(), run.last_step()
            if time.monotonic() - moved_at > STALL_SECONDS:
                run.process.kill()
                run.process.wait(timeout=30)
                self.violations.append(f"{name} made no step for {STALL_SECONDS:g} s")
        if run.code() != 0:
            self.violations.append(f"{name} ended with code {run.code()}")
        left = run.left()
        if left:
            self.violations.append(f"{name} left {left}")

    def compare(self, num_steps: int) -> None:
        struck, calm = self.struck.steps(), self.calm.steps()
        missing = [step for step in range(1, num_steps + 1) if step not in struck]
        if missing:
            self.violations.append(f"steps without a report: {missing[:10]}")
        differing = [step for step in calm if step in struck and struck[step] != calm[step]]
        if differing:
            first = differing[0]
            names = [n for n in calm[first] if calm[first][n] != struck[first].get(n)]
            self.violations.append(f"metrics differ in steps {differing[:10]}, e.g. {names[:5]}")
        pair = [
            files_of(r.checkpoints / f"global_step_{num_steps}") for r in (self.struck, self.calm)
        ]
        unequal = sorted(
            n for n in pair[0].keys() | pair[1].keys() if pair[0].get(n) != pair[1].get(n)
        )
        if unequal or not pair[0]:
            self.violations.append(f"the last checkpoints differ in {unequal or 'everything'}")

    def check_slopes(self) -> None:
        self.growth: dict[str, float] = {}
        last = self.calm.last_step()
        settled = [one for one in self.calm.samples if last / 2 <= one["step"] < last]
        times = [one["time"] for one in settled]
        for name, limit in SLOPES.items():
            values = [one[name] for one in settled]
            self.growth[name] = slope_of(times, values) * (times[-1] - times[0]) if times else 0.0
            if self.growth[name] > limit:
                self.violations.append(
                    f"{name} of the undisturbed run grew by {self.growth[name]:.1f}, limit {limit}"
                )

    def report(self) -> None:
        for line in self.lines():
            print(line)
        result = {
            "minutes": self.minutes,
            "steps": self.calm.last_step(),
            "lives": self.struck.num_lives,
            "events": self.events,
            "growth": self.growth,
            "violations": self.violations,
        }
        (self.folder / "result.json").write_text(json.dumps(result, indent=1))
        plot(self, self.folder / "soak.png")

    def lines(self) -> Iterator[str]:
        counts = Counter(event["what"] for event in self.events)
        yield "| what happened | times |"
        yield "|---|---|"
        yield from (f"| {what} | {count} |" for what, count in sorted(counts.items()))
        yield ""
        calm = self.calm.samples
        seconds = calm[-1]["time"] - calm[0]["time"] if calm else 0.0
        yield f"undisturbed: {self.calm.last_step()} steps in {seconds:.0f} s"
        yield ""
        yield "| | growth in its second half | limit | highest | highest when struck |"
        yield "|---|---|---|---|---|"
        for name, limit in SLOPES.items():
            highest = [max(s[name] for s in run.samples) for run in (self.calm, self.struck)]
            shown = (f"{self.growth[name]:+.2f}", f"{limit:g}", *(f"{h:.0f}" for h in highest))
            yield f"| {name} | {' | '.join(shown)} |"
        yield ""
        yield f"{self.struck.num_lives - 2} dead controllers, {self.calm.last_step()} steps"
        yield from (f"VIOLATION: {one}" for one in self.violations)
        yield "all held" if not self.violations else f"{len(self.violations)} violations"


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint that do not hold times."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("manifest.json", "data.json")
    }


def plot(soak: Soak, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(10, 9), sharex=True)
    for axis, name in zip(axes, ("step", "memory_mb", "descriptors"), strict=True):
        for run, label in ((soak.struck, "struck"), (soak.calm, "undisturbed")):
            times = [(one["time"] - soak.begin) / 60 for one in run.samples]
            axis.plot(times, [one[name] for one in run.samples], ".", markersize=2, label=label)
        for event in soak.events:
            axis.axvline(event["at"] / 60, color="tab:red", alpha=0.2, linewidth=0.7)
        axis.set_ylabel(name)
    axes[0].legend(loc="upper left")
    axes[-1].set_xlabel("minutes; red: something happened")
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "soak")
    chosen = parser.parse_args()
    folder = chosen.out / time.strftime("%Y%m%d-%H%M%S")
    soak = Soak(chosen.minutes, folder, random.Random(chosen.seed))
    has_held = soak.go()
    print(f"{folder}: result.json, soak.png, output.txt of both runs")
    return 0 if has_held else 1


if __name__ == "__main__":
    sys.exit(main())
