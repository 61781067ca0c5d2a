"""The picture task: its pictures, its control, and the numbers in its README."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.picture_task import build, run

FOLDER = Path(build.__file__).parent


def squares(octets):
    """Cells of a picture that hold a square: their upper left pixel has a pure colour."""
    pixels = np.asarray(Image.open(io.BytesIO(octets)))
    corners = pixels[1 :: build.CELL, 1 :: build.CELL].reshape(-1, 3)
    return sum(corner.tolist() in build.COLOURS.tolist() for corner in corners)


def test_answers_belong_to_the_pictures_except_in_the_control():
    right = []
    for is_shuffled in (False, True):
        rows = build.rows(64, np.random.default_rng(1), is_shuffled=is_shuffled)
        counts = [squares(row["images"][0]["bytes"]) for row in rows]
        answers = [int(row["reward_model"]["ground_truth"]) for row in rows]
        right.append(np.mean(np.array(counts) == answers))
    assert right[0] == 1
    assert right[1] < 0.5


def test_the_readme_has_the_numbers_that_were_measured():
    results = json.loads((FOLDER / "results" / "seed0.json").read_text())
    text = (FOLDER / "README.md").read_text()
    for name, label in (("grpo", "pictures"), ("grpo_shuffled", "shuffled pictures")):
        numbers = [f"{100 * value:.0f}%" for value in results[name]["accuracy"].values()]
        assert f"| {label} | {' | '.join(numbers)} |" in text
    assert re.search(rf"\b{results['grpo']['seconds']} s for GRPO", text)


@pytest.mark.slow
def test_the_commands_run(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["run.py", "--out", str(tmp_path), "--sft-steps", "2", "--grpo-steps", "1"]
    )
    run.main()
    assert json.loads((tmp_path / "results.json").read_text())["grpo"]["accuracy"]
