"""The example of docs/weight_sync.md runs, and the page shows what was measured."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "weight_sync.md").read_text()


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(example, "docs/weight_sync.md", "exec"), {})


def test_the_page_shows_the_numbers_of_the_results():
    results = json.loads((ROOT / "benchmarks" / "results" / "weight_sync.json").read_text())
    shown = re.findall(r"^\| .* \| (\d+\.\d\d) \|$", PAGE, re.MULTILINE)
    measured = results["gigabytes_per_cpu_second"].values()
    assert shown == [f"{speed:.2f}" for speed in measured]
    assert results["command"] in PAGE
