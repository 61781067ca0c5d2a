"""The commands and the class in docs/sft.md run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.sft_cases import trainer, write_model

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "sft.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_dataset_of_the_documentation_is_learnt_from(tmp_path):
    (code,) = blocks("python")
    (tmp_path / "countdown.py").write_text(code)
    changes = {
        "data.custom_cls.path": str(tmp_path / "countdown.py"),
        "data.custom_cls.name": "Countdown",
        "trainer.total_training_steps": 30,
    }
    sft = trainer(write_model(tmp_path / "model"), tmp_path, **changes)
    before = sft.mean_loss(sft.val_dataset)
    for step in range(1, 31):
        sft.train_step(step)
    assert sft.mean_loss(sft.val_dataset) < 0.5 * before


def test_every_metric_of_a_step_is_documented(tmp_path):
    metrics = trainer(write_model(tmp_path / "model"), tmp_path).train_step(1)
    page = PAGE.read_text()
    assert [name for name in metrics if f"`{name}`" not in page] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_first_run_of_the_documentation_runs(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-eu", "-c", blocks("sh")[0]],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last == "the model is in runs/sft/checkpoints/global_step_10/huggingface"
    assert (tmp_path / last.removeprefix("the model is in ") / "model.safetensors").exists()
