"""Many short runs, each a process with one thread; what has finished is kept on disk.

`run_all` is given tasks, each a mapping that names it (`{"name": "grpo", "seed": 3}`), and the
words that start one. A run prints its result as the last line of its output, as JSON. Results are
lines of a file, so what is stopped goes on from there.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

Task = Mapping[str, Any]
Result = dict[str, Any]


def run_all(
    tasks: Sequence[Task],
    words: Callable[[Task], Sequence[str]],
    finished: Path,
    *,
    jobs: int,
    timeout_seconds: float,
) -> list[Result]:
    """The results in the order of the tasks; one that failed has `error`, and runs again next time.

    `words(task)` follow the interpreter's name in the command.
    """
    lines = finished.read_text().splitlines() if finished.exists() else []
    known = {_key(result, tasks[0]): result for result in map(json.loads, lines)}
    lock = Lock()

    def run(task: Task) -> Result:
        key = _key(task, task)
        if key not in known or "error" in known[key]:
            known[key] = {**task, **_run_apart(words(task), timeout_seconds)}
            with lock, finished.open("a") as file:
                file.write(json.dumps(known[key]) + "\n")
            failed = "failed" if "error" in known[key] else f"{known[key]['seconds']:.0f} s"
            print(*task.values(), failed, flush=True)
        return known[key]

    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(run, tasks))
    for result in (one for one in results if "error" in one):
        print(f"{result}\n{result['error']}", file=sys.stderr)
    return results


def _key(found: Task, task: Task) -> tuple[Any, ...]:
    return tuple(found[name] for name in task)


def _run_apart(words: Sequence[str], timeout_seconds: float) -> Result:
    """What a run printed last, or what it wrote if it failed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout_seconds:g} s"}
    if done.returncode:
        return {"error": done.stderr[-2000:] or done.stdout[-2000:]}
    return json.loads(done.stdout.splitlines()[-1])
