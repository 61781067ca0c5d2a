"""What docs/controllers.md shows runs as it stands, and the package exports its names."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "controllers.md"


def test_the_examples_run(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks))
    environment = {"PYTHONPATH": str(PAGE.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr


def test_the_benchmark_runs():
    benchmark = runpy.run_path(str(PAGE.parents[1] / "benchmarks" / "controller.py"))
    cost = benchmark["simulated"](world_size=8, rows_per_worker=2, tokens=16, repeats=1)
    assert (cost["workers"], cost["rows"]) == (8, 16)
    assert cost["us_per_worker"] > 0


def test_every_mode_is_in_the_table():
    from verl.single_controller.base.decorator import Dispatch

    text = PAGE.read_text()
    assert [name for name in Dispatch.names() if f"`{name}`" not in text] == []


def test_the_package_exports_its_documented_names():
    import verl
    from verl.single_controller import (
        ClassWithInitArgs,
        ResourcePool,
        Worker,
        WorkerGroup,
        __version__,
    )
    from verl.single_controller.base.worker import Worker as SameWorker
    from verl.single_controller.base.worker_group import ClassWithInitArgs as SameClass

    assert Worker is SameWorker
    assert ClassWithInitArgs is SameClass
    assert __version__ == verl.__version__
    assert ClassWithInitArgs(dict, a=1)() == {"a": 1}
    assert ResourcePool([1]).world_size == 1
    assert WorkerGroup.__name__ == "WorkerGroup"
