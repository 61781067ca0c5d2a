"""Plant small faults in the package and see which of them the tests notice.

    python scripts/mutate.py --count 200 --jobs 14 --seed 0 --deadline-seconds 560 --output FILE

`mutants.py` says which faults. First the tests run once in the unchanged tree (pytest-xdist), and
each notes the lines of the package that it and its child processes execute (`executed_lines.py`); a
test that fails or is skipped here is not used. The map is kept (`--map`, `build/mutants/map.json`)
and made again when it is missing (`--map-only` makes just the map). A machine with a GPU runs the
tests that need one too. Then every job has a copy of the tree, and each mutant runs in a process
forked from one in which the libraries are loaded: the tests that execute its line, quickest first,
then more of the folder that mirrors its module, until one fails. A test that notices something for
the first time runs in an unchanged copy too; if it fails there, it is not used any more, and its
mutants run again without it. What no test notices is planted once more for the tests of the GPU
kernels, in Triton's interpreter. `--at` plants only some of the drawn mutants, as after new tests.

`equivalent_mutants.txt` lists mutants that change nothing anybody can observe, each with the
reason; those are counted, not planted.

The report is written anew whenever something is known, so that a run that is cut short has one.
With a deadline the map gets half of the time at most (tests that were not reached are not used),
and no mutant begins in the last 40 seconds; the last line of the report counts them all.
"""

import argparse
import contextlib
import importlib
import importlib.util
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
KERNEL_TESTS = (
    "tests/models/kernels",
    *(f"tests/workers/rollout/test_{name}.py" for name in ("kernel_batch", "prefill_buckets")),
    *(f"tests/workers/rollout/test_{name}.py" for name in ("paged_batch", "kernel_sessions")),
)
COMPILED, INTERPRETED = {"TRITON_INTERPRET": "0"}, {"TRITON_INTERPRET": "1"}
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
COPIED = ("verl", "tests", "examples", "scripts", "benchmarks", "docs")
PRELOADED = (
    *("torch", "torch.distributed", "torch._dynamo", "transformers", "transformers.modeling_utils"),
    *("transformers.models.qwen2.modeling_qwen2", "transformers.models.llama.modeling_llama"),
    *("numpy", "tensordict", "omegaconf", "hydra", "pyarrow", "datasets", "peft", "sympy"),
)
LAST_SECONDS = 40.0
"""Before the deadline: what runs may end, nothing begins but checks of tests."""
NO_VERDICT = "no test failed, but the exit status is "
TRACE_CHILD = (
    "import os\nif 'EXECUTED_LINES_OF_CHILDREN' in os.environ:\n    import executed_lines\n"
)
FIRST_TESTS, FIRST_SECONDS = 25, 10.0
LONGEST_TEST_SECONDS = 60.0
INTERPRETED_TESTS_TAKE = 4  # times as long: few mutants get there


# ---------------------------------------------------------------------------- the map


def make_map(
    path: Path, jobs: int, folders: Sequence[str], seconds: float, variables: dict[str, str]
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.with_suffix(".log")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(TRACE_CHILD)
        environment = {
            **os.environ,
            **child_environment(ROOT),
            **variables,
            "EXECUTED_LINES_FOLDER": folder,
            "EXECUTED_LINES_OF": ":".join(str(ROOT / target) for target in TARGETS),
            "PYTHONPATH": f"{search_path(ROOT)}:{Path(__file__).parent}:{folder}",
        }
        marked = "not slow and not ray" + ("" if has_gpu() else " and not gpu")
        options = "-q -p executed_lines -p no:cacheprovider --continue-on-collection-errors"
        # Not whole files: a few long ones would be waited for.
        options += f" -W default --dist worksteal -n {jobs}"
        command = [sys.executable, "-m", "pytest", *options.split(), "-m", marked, *folders]
        with log.open("w") as output:
            running = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                running.wait(seconds)
            except subprocess.TimeoutExpired:
                print(f"  the map was cut after {seconds:.0f} s; it holds what was run", flush=True)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)
                running.wait(60)
        tests = {}
        for part in Path(folder).glob("*.json"):
            tests |= json.loads(part.read_text().replace(f'"{ROOT}/', '"'))
    if not tests:
        sys.exit(f"no test passed in the unchanged tree; {log} says why")
    path.write_text(json.dumps(tests))
    print(f"  {len(tests)} tests", flush=True)


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
    folder = Path("tests", *Path(mutant.path).parts[1:-1])
    while not (ROOT / folder).is_dir():
        folder = folder.parent

    def mirrors(name: str) -> bool:
        return name.startswith(f"{folder}/")

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


class Planting:
    """Runs of mutants and of unchanged copies, at most one in each folder at a time."""

    def __init__(
        self,
        tests: dict[str, Any],
        folders: Sequence[Path],
        budget_seconds: float,
        end: float,
        variables: dict[str, str],
    ) -> None:
        self.tests = tests
        self.variables = variables
        self.folders = folders
        self.budget_seconds = budget_seconds
        self.end = end
        self.verdicts: dict[Mutant, str] = {}
        self.is_sound: dict[str, bool] = {}
        """Of tests that ran in an unchanged copy: whether they passed."""
        self._claims: dict[str, list[Mutant]] = {}
        """Mutants noticed by a test of which that is not known yet."""

    def run(self, mutants: Sequence[Mutant]) -> Iterator[None]:
        """Yields whenever something more is known; what is not at the end has no verdict."""
        waiting: list[Mutant | str] = list(mutants)  # a text is a test to run in an unchanged copy
        free, running = list(self.folders), []
        while (waiting or running) and time.monotonic() < self.end:
            may_plant = time.monotonic() < self.end - LAST_SECONDS
            while free and waiting and (may_plant or isinstance(waiting[0], str)):
                running.append(self._start(waiting.pop(0), free.pop()))
            if not may_plant and not running:
                break
            time.sleep(0.05)
            for run in list(running):
                verdict = verdict_of(run)
                if verdict is not None:
                    running.remove(run)
                    restore(run)
                    free.append(run.folder)
                    waiting[:0] = self._learn(run, verdict)
                    yield
        for run in running:
            os.killpg(run.process, signal.SIGKILL)
            os.waitpid(run.process, 0)
        for test, claims in self._claims.items():
            self.verdicts |= dict.fromkeys(claims, f"noticed, unchecked: {test}")

    def _start(self, subject: Mutant | str, folder: Path) -> Run:
        if isinstance(subject, str):
            plan = Plan([subject], [], self.tests[subject]["seconds"])
            return start(None, plan, folder, self.variables)
        sound = {name: note for name, note in self.tests.items() if self.is_sound.get(name, True)}
        plan = plan_tests(subject, sound, self.budget_seconds)
        return start(subject, plan, folder, self.variables)

    def _learn(self, run: Run, verdict: str) -> list[Mutant | str]:
        """What is to be run next because of it."""
        if run.mutant is None:
            (test,) = run.plan.first
            self.is_sound[test] = verdict == "not noticed"
            claims = self._claims.pop(test)
            if not self.is_sound[test]:
                print(f"not used: {test} fails in an unchanged copy", flush=True)
                return list(claims)
            self.verdicts |= dict.fromkeys(claims, f"noticed: {test}")
            return []
        print(f"{run.mutant.path}:{run.mutant.line} {run.mutant.kind}: {verdict}", flush=True)
        test = verdict.removeprefix("noticed: ")
        if test not in self.tests or self.is_sound.get(test, False):
            self.verdicts[run.mutant] = verdict
            return []
        if test in self.is_sound:
            return [run.mutant]
        is_new = test not in self._claims
        self._claims.setdefault(test, []).append(run.mutant)
        return [test] if is_new else []


def preload() -> None:
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except ImportError:
            print(f"  without {name}: the tests that need it are not used", flush=True)


def copy_tree(place: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy2(path, place)


def start(mutant: Mutant | None, plan: Plan, folder: Path, variables: dict[str, str]) -> Run:
    if mutant is not None:
        (folder / mutant.path).write_text(mutant.source)
    log = folder / "mutant.log"
    process = os.fork()
    if process == 0:
        run_tests(plan, folder, log, variables)
    patience = 60 + 6 * plan.seconds
    return Run(mutant, plan, folder, log, time.monotonic() + patience, process)


def run_tests(plan: Plan, folder: Path, log: Path, variables: dict[str, str]) -> None:
    """In the forked process: leave with the exit status of pytest."""
    status = 70
    try:
        os.setsid()
        os.chdir(folder)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(child_environment(folder) | variables)
        own = {str(ROOT), str(Path(__file__).parent)}
        sys.path[:] = [str(folder), *(entry for entry in sys.path if entry not in own)]
        sys.dont_write_bytecode = True
        pytest = importlib.import_module("pytest")
        # Processes that tests spawn import the main module: this file is not on their path.
        sys.modules["__main__"].__spec__ = importlib.util.find_spec("pytest.__main__")
        options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "60"]
        options += ["-m", "", "-W", "default", "--rootdir", str(folder), "--tb", "line"]
        for names in (plan.first, plan.rest):
            files = dict.fromkeys(str(folder / name.split("::")[0]) for name in names)
            status = pytest.main([*options, *files], plugins=[Chosen(names)]) if names else 0
            if status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
                break
            status = 0
    finally:
        sys.stdout.flush()
        os._exit(int(status))


class Chosen:
    """A pytest plugin: only these tests run, in this order. Names that are not the same in each
    run are not found, which is no error."""

    def __init__(self, names: Sequence[str]) -> None:
        self.order = {name: number for number, name in enumerate(names)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid in self.order]
        items.sort(key=lambda item: self.order[item.nodeid])


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
    return "not noticed" if code == 0 else verdict_of_failure(run.log, code)


def verdict_of_failure(log: Path, code: int) -> str:
    """A run that ended without a failed test, as with a signal, says nothing about the mutant."""
    for line in log.read_text(errors="replace").splitlines():
        kind, _, rest = line.partition(" ")
        if kind in ("FAILED", "ERROR") and rest.startswith("tests/"):
            return f"noticed: {rest.split(' - ')[0]}"
    return f"{NO_VERDICT}{code}"


def restore(run: Run) -> None:
    if run.mutant is not None:
        shutil.copy2(ROOT / run.mutant.path, run.folder / run.mutant.path)


def main() -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline-seconds", type=float, default=7200, help="for everything")
    parser.add_argument("--test-seconds", type=float, default=45, help="of tests for one mutant")
    parser.add_argument("--only", default="", help="part of the paths to mutate")
    parser.add_argument("--at", nargs="+", help="only these of the drawn ones, as path:line")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="what the map is made of")
    parser.add_argument("--map", type=Path, default=ROOT / "build" / "mutants" / "map.json")
    parser.add_argument("--map-only", action="store_true")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "mutants" / "report.txt")
    options = parser.parse_args()
    os.environ.update(child_environment(ROOT))
    suites = [(options.map, options.tests, COMPILED)]
    if options.tests is TESTS and not has_gpu():  # there the map has the kernels' tests
        suites.append((options.map.with_name("map_of_kernels.json"), KERNEL_TESTS, INTERPRETED))
    for path, tests, variables in suites:
        if options.map_only or not path.exists():
            print(f"running {' '.join(tests)} in the unchanged tree", flush=True)
            share = 1.0 if options.map_only else 0.5
            make_map(path, options.jobs, tests, share * options.deadline_seconds, variables)
    if options.map_only:
        return
    drawn = draw(options.count, options.seed, options.only)
    if options.at:
        drawn = [m for m in drawn if f"{m.path}:{m.line}" in options.at]
    known = equivalent_ones()
    to_plant = [mutant for mutant in drawn if (mutant.path, mutant.diff()) not in known]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    os.environ.update(suites[-1][2])  # what Triton's own functions become is settled by the import
    preload()
    print(f"planting after {time.monotonic() - begin:.0f} s", flush=True)
    verdicts: dict[Mutant, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        folders = [Path(folder) / f"job{number}" for number in range(options.jobs)]
        for place in folders:
            copy_tree(place)
        end = begin + options.deadline_seconds
        for path, _, variables in suites:
            tests = json.loads(path.read_text())
            seconds = options.test_seconds
            seconds *= INTERPRETED_TESTS_TAKE if variables is INTERPRETED else 1
            planting = Planting(tests, folders, seconds, end, variables)
            left = [mutant for mutant in to_plant if is_missed(verdicts.get(mutant, "not noticed"))]
            for _ in planting.run(left):
                options.output.write_text(summary(drawn, to_plant, verdicts | planting.verdicts))
            verdicts |= planting.verdicts
    report = summary(drawn, to_plant, verdicts)
    options.output.write_text(report)
    print(report)


def equivalent_ones() -> set[tuple[str, str]]:
    """Path and difference; blocks of the file are a path, the difference, and the reason."""
    blocks = [block.splitlines() for block in EQUIVALENT.read_text().split("\n\n")]
    return {
        (path, "\n".join(line for line in lines if line[:1] in "+-"))
        for path, *lines in (block for block in blocks if not block[0].startswith("#"))
    }


def is_missed(verdict: str) -> bool:
    return verdict.startswith(("not noticed", NO_VERDICT))


def summary(
    drawn: Sequence[Mutant], to_plant: Sequence[Mutant], verdicts: dict[Mutant, str]
) -> str:
    missed = [mutant for mutant in to_plant if is_missed(verdicts.get(mutant, ""))]
    unchecked = sum(verdict.startswith("noticed, unchecked") for verdict in verdicts.values())
    num_noticed = len(verdicts) - len(missed)
    lines = [f"not noticed, by kind: {dict(Counter(mutant.kind for mutant in missed))}"]
    for mutant in sorted(missed, key=lambda mutant: (mutant.path, mutant.line)):
        place = f"{mutant.path}:{mutant.line}  {mutant.kind}: {verdicts[mutant]}"
        lines += ["", place, mutant.diff()]
    share = 100 * num_noticed / max(1, len(verdicts))
    lines += [
        "",
        f"{len(drawn)} drawn, {len(drawn) - len(to_plant)} of them known to change nothing",
        f"{len(verdicts)} of {len(to_plant)} planted: {num_noticed} noticed ({share:.1f}%), "
        f"{unchecked} of them by tests that were not checked; {len(missed)} not noticed: "
        + (", ".join(f"{mutant.path}:{mutant.line}" for mutant in missed) or "none"),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
