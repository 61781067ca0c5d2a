"""Plant small faults in the package and see which of them the tests notice.

    python scripts/mutate.py --count 200 --jobs 14 --seed 0 --minutes 8 --output mutants.txt

`mutants.py` says which faults. First the tests run once in the unchanged tree (pytest-xdist), and
each notes the lines of the package that it executes (`executed_lines.py`); a test that fails or is
skipped here is not used. The map is kept in `build/mutants/map.json` and made again when it is
missing (`--map-only` makes just the map). A machine with a GPU runs the tests that need one too.
Then every job has a copy of the tree, and each mutant runs in a process forked from one in which
the libraries are loaded: the tests that execute its line, quickest first, then more of the folder
that mirrors its module (other processes may execute it), until one fails. At the end each test that
noticed something runs in an unchanged copy too; a mutant whose test fails there is in doubt, and
counts as one that was not noticed.
"""

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutants import ROOT, TARGETS, Mutant, draw

TESTS = (
    *("tests/algos", "tests/workers", "tests/utils", "tests/trainer", "tests/agent_loop"),
    *("tests/models", "tests/experimental", "tests/e2e", "tests/parity", "tests/protocol"),
)
COPIED = ("verl", "tests", "examples", "scripts", "benchmarks", "docs")
PRELOADED = (
    *("torch", "torch.distributed", "torch._dynamo", "transformers", "transformers.modeling_utils"),
    *("transformers.models.qwen2.modeling_qwen2", "transformers.models.llama.modeling_llama"),
    *("numpy", "tensordict", "omegaconf", "hydra", "pyarrow", "datasets", "peft", "sympy"),
)
MAP = ROOT / "build" / "mutants" / "map.json"
CHECK_SECONDS = 120.0
FIRST_TESTS, FIRST_SECONDS = 25, 10.0
LONGEST_TEST_SECONDS = 25.0


# ---------------------------------------------------------------------------- the map


def make_map(jobs: int, folders: list[str]) -> None:
    MAP.parent.mkdir(parents=True, exist_ok=True)
    log = MAP.with_suffix(".log")
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            **child_environment(ROOT),
            "EXECUTED_LINES_FOLDER": folder,
            "EXECUTED_LINES_OF": ":".join(str(ROOT / target) for target in TARGETS),
            "PYTHONPATH": f"{search_path(ROOT)}:{Path(__file__).parent}",
        }
        marked = "not slow and not ray" + ("" if has_gpu() else " and not gpu")
        options = "-q -p executed_lines -p no:cacheprovider --continue-on-collection-errors"
        options += f" -W default --dist loadfile -n {jobs}"
        command = [sys.executable, "-m", "pytest", *options.split(), "-m", marked, *folders]
        with log.open("w") as output:
            subprocess.run(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=3600
            )
        tests = {}
        for part in Path(folder).glob("*.json"):
            tests |= json.loads(part.read_text().replace(f'"{ROOT}/', '"'))
    if not tests:
        sys.exit(f"no test passed in the unchanged tree; {log} says why")
    MAP.write_text(json.dumps(tests))


def has_gpu() -> bool:
    command = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    return subprocess.run(command, timeout=300).returncode == 0


@dataclass(frozen=True)
class Plan:
    """The tests of a mutant in two rounds: a quick one that finds most faults, and the rest."""

    first: list[str]
    rest: list[str]
    seconds: float


def plan_tests(mutant: Mutant, tests: dict[str, Any], budget_seconds: float) -> Plan:
    def mirrors(name: str) -> bool:
        parts = Path(mutant.path).parts[1:-1]
        return name.startswith("/".join(("tests", *parts)))

    on_line, in_file, near = [], [], []
    for name, note in tests.items():
        if note["seconds"] > LONGEST_TEST_SECONDS:
            continue
        lines = note["lines"].get(mutant.path, ())
        if mutant.line in lines:
            on_line.append(name)
        elif lines and mirrors(name):
            in_file.append(name)
        elif mirrors(name):
            near.append(name)
    for names in (on_line, in_file, near):
        names.sort(key=lambda name: tests[name]["seconds"])
    chosen, seconds = [], 0.0
    for name in (*on_line, *in_file, *near):
        if seconds + tests[name]["seconds"] <= budget_seconds:
            chosen.append(name)
            seconds += tests[name]["seconds"]
    first, first_seconds = [], 0.0
    for name in chosen[:FIRST_TESTS]:
        first_seconds += tests[name]["seconds"]
        if first and first_seconds > FIRST_SECONDS:
            break
        first.append(name)
    return Plan(first, [name for name in chosen if name not in set(first)], seconds)


# ---------------------------------------------------------------------------- the runs


@dataclass
class Run:
    mutant: Mutant | None
    """None is an unchanged copy."""
    plan: Plan
    folder: Path
    log: Path
    deadline: float
    process: int


def run_all(
    mutants: list[Mutant], jobs: int, minutes: float, budget_seconds: float, folder: Path
) -> dict[Mutant, str]:
    """What became of each mutant; those without an entry were not reached in time."""
    tests = json.loads(MAP.read_text())
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except ImportError:
            print(f"  without {name}: the tests that need it are not used", flush=True)
    folders = [folder / f"job{number}" for number in range(jobs)]
    for place in folders:
        copy_tree(place)
    queue = [(mutant, plan_tests(mutant, tests, budget_seconds)) for mutant in mutants]
    verdicts = {}
    for run, verdict in run_queue(queue, folders, minutes * 60):
        assert run.mutant is not None
        verdicts[run.mutant] = verdict
    noticing = {verdict.removeprefix("noticed: ") for verdict in verdicts.values()} & tests.keys()
    again = [(None, Plan([name], [], tests[name]["seconds"])) for name in sorted(noticing)]
    print(f"{len(again)} tests that noticed something run in an unchanged copy", flush=True)
    for run, verdict in run_queue(again, folders, CHECK_SECONDS):
        if verdict != "not noticed":
            (test,) = run.plan.first
            verdicts = {
                mutant: f"in doubt: {test} fails without it too" if test in found else found
                for mutant, found in verdicts.items()
            }
    return verdicts


def run_queue(
    queue: Sequence[tuple[Mutant | None, Plan]], folders: Sequence[Path], seconds: float
) -> Iterator[tuple[Run, str]]:
    """Runs and their verdicts as they end; what has not ended in time is left out."""
    waiting, free, running = list(queue), list(folders), []
    end = time.monotonic() + seconds
    while (waiting or running) and time.monotonic() < end:
        while waiting and free:
            running.append(start(*waiting.pop(0), free.pop()))
        time.sleep(0.05)
        for run in list(running):
            verdict = verdict_of(run)
            if verdict is not None:
                running.remove(run)
                restore(run)
                free.append(run.folder)
                show(run.mutant, verdict, len(waiting) + len(running))
                yield run, verdict
    for run in running:
        os.killpg(run.process, signal.SIGKILL)
        os.waitpid(run.process, 0)
        restore(run)


def copy_tree(place: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy2(path, place)


def start(mutant: Mutant | None, plan: Plan, folder: Path) -> Run:
    if mutant is not None:
        (folder / mutant.path).write_text(mutant.source)
    log = folder / "mutant.log"
    process = os.fork()
    if process == 0:
        run_tests(plan, folder, log)
    patience = 60 + 6 * plan.seconds
    return Run(mutant, plan, folder, log, time.monotonic() + patience, process)


def run_tests(plan: Plan, folder: Path, log: Path) -> None:
    """In the forked process: leave with the exit status of pytest."""
    status = 70
    try:
        os.setsid()
        os.chdir(folder)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(child_environment(folder))
        own = {str(ROOT), str(Path(__file__).parent)}
        sys.path[:] = [str(folder), *(entry for entry in sys.path if entry not in own)]
        sys.dont_write_bytecode = True
        pytest = importlib.import_module("pytest")
        options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "60"]
        options += ["-m", "", "-W", "default", "--rootdir", str(folder), "--tb", "line"]
        for names in (plan.first, plan.rest):
            status = pytest.main([*options, *names]) if names else 0
            if status == pytest.ExitCode.USAGE_ERROR:  # names that are not the same in each run
                unknown = log.read_text(errors="replace")
                names = [name for name in names if f"not found: {folder / name}" not in unknown]
                status = pytest.main([*options, *names]) if names else 0
            if status != 0:
                break
    finally:
        sys.stdout.flush()
        os._exit(int(status))


def child_environment(folder: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": search_path(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # CUDA begins after the fork, not before
    }


def search_path(folder: Path) -> str:
    entries = os.environ.get("PYTHONPATH", "").split(":")
    others = [entry for entry in entries if entry and Path(entry).resolve() != ROOT]
    return ":".join([str(folder), *(str(Path(entry).resolve()) for entry in others)])


def verdict_of(run: Run) -> str | None:
    process, status = os.waitpid(run.process, os.WNOHANG)
    if process == 0 and time.monotonic() < run.deadline:
        return None
    with contextlib.suppress(ProcessLookupError):  # nothing is left of the group
        os.killpg(run.process, signal.SIGKILL)
    if process == 0:
        os.waitpid(run.process, 0)
        return "noticed: no end"
    code = os.waitstatus_to_exitcode(status)
    return "not noticed" if code == 0 else f"noticed: {first_failure(run.log, code)}"


def first_failure(log: Path, code: int) -> str:
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" - ")[0].split(" ", 1)[1]
    return f"exit status {code}"


def restore(run: Run) -> None:
    if run.mutant is not None:
        shutil.copy2(ROOT / run.mutant.path, run.folder / run.mutant.path)


def show(mutant: Mutant | None, verdict: str, left: int) -> None:
    if mutant is not None:
        print(f"[{left} left] {mutant.path}:{mutant.line} {mutant.kind}: {verdict}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60, help="for the mutants, not the map")
    parser.add_argument("--test-seconds", type=float, default=45, help="of tests for one mutant")
    parser.add_argument("--only", default="", help="part of the paths to mutate")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="what the map is made of")
    parser.add_argument("--map-only", action="store_true")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "mutants" / "report.txt")
    options = parser.parse_args()
    os.environ.update(child_environment(ROOT))
    if options.map_only or not MAP.exists():
        print("running the tests in the unchanged tree", flush=True)
        make_map(options.jobs, options.tests)
    if options.map_only:
        return
    mutants = draw(options.count, options.seed, options.only)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        verdicts = run_all(
            mutants, options.jobs, options.minutes, options.test_seconds, Path(folder)
        )
    report = summary(mutants, verdicts)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(report)
    print(report)


def summary(mutants: list[Mutant], verdicts: dict[Mutant, str]) -> str:
    missed = [
        mutant for mutant in mutants if not verdicts.get(mutant, "noticed").startswith("noticed")
    ]
    num_run = len(verdicts)
    share = 100 * (1 - len(missed) / max(1, num_run))
    lines = [
        f"{num_run - len(missed)} of {num_run} mutants noticed ({share:.1f}%); "
        f"{len(mutants) - num_run} not run",
        f"not noticed, by kind: {dict(Counter(mutant.kind for mutant in missed))}",
    ]
    for mutant in sorted(missed, key=lambda mutant: (mutant.path, mutant.line)):
        lines += [
            "",
            f"{mutant.path}:{mutant.line}  {mutant.kind}; {verdicts[mutant]}",
            mutant.diff(),
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
