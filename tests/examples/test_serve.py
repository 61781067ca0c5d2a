"""How `make serve` finds what to serve; the page itself is tested in `tests/browser`."""

import subprocess
import sys
from pathlib import Path

import pytest

from examples.serve.run import quickstart_model


def test_the_newest_weights_of_the_quickstart_are_served(tmp_path):
    for step in (5, 25, 100):
        (tmp_path / f"grpo/global_step_{step}/actor/huggingface").mkdir(parents=True)
    assert quickstart_model(tmp_path).parts[-3] == "global_step_100"


def test_without_a_trained_model_it_says_how_to_get_one(tmp_path):
    with pytest.raises(SystemExit, match="run `make quickstart` first, or serve another one"):
        quickstart_model(tmp_path)


@pytest.mark.slow
def test_a_model_that_is_not_there_is_named_without_a_traceback(tmp_path):
    script = Path(__file__).parents[2] / "examples" / "serve" / "run.py"
    done = subprocess.run(
        [sys.executable, str(script), "--model", str(tmp_path / "absent")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("cannot serve: ")
    assert "absent" in done.stderr
    assert "Traceback" not in done.stderr
