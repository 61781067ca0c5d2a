"""The examples in docs/sandbox.md print what they say they print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.utils.sandbox.needs import require_namespaces

PAGE = Path(__file__).parents[3] / "docs" / "sandbox.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES, ids=["sandbox", "reward"])
def test_an_example_prints_what_its_comments_say(example):
    require_namespaces()
    found = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=60
    )
    promised = re.findall(r"^print\(.*\)  # (.*)$", example, re.MULTILINE)
    assert found.stdout.splitlines() == promised, found.stderr
