"""Metrics and traces of a run in the real Trackio, which writes below a folder of this machine."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "build" / "trackio"
PROGRAM = """
import sys
from pathlib import Path

sys.path.append(sys.argv[1])
from tests.toy import ROLLOUT, make_toy, toy_run

folder = Path(sys.argv[2])
toy_run(
    make_toy(folder / "toy"), folder / "run", f"{ROLLOUT}.trace.backend=trackio",
    "data.val_files=[]", f"{ROLLOUT}.trace.max_samples_per_step_per_worker=3",
    "trainer.logger=[trackio]",
)
"""


@pytest.mark.slow
@pytest.mark.skipif(not PACKAGES.is_dir(), reason="make test-trackio installs trackio there")
def test_metrics_and_traces_are_one_run_of_trackio(tmp_path):
    """In a process of its own: it logs from agent loops, which run on threads."""
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(PACKAGES), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRACKIO_DIR": str(tmp_path / "trackio")},
        check=True,
        timeout=110,
    )
    (database,) = (tmp_path / "trackio").glob("*.db")
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
        (config,) = connection.execute("SELECT config FROM configs").fetchall()
    assert {name for name, _, _ in rows} == {"run"}
    logged = [(step, json.loads(metrics)) for _, step, metrics in rows]
    scores = {
        step: found["critic/score/mean"] for step, found in logged if "critic/score/mean" in found
    }
    assert sorted(scores) == [1, 2]
    assert json.loads(config[0])["data"]["train_batch_size"] == 4
    lines = [
        json.loads(line)
        for path in (tmp_path / "trackio" / "traces").rglob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    traces = [line["trackio"] for line in lines if line["type"] == "session"]
    assert {trace["run_name"] for trace in traces} == {"run"}
    samples = [trace for trace in traces if "sample_index" in trace["metadata"]]
    assert sorted(trace["step"] for trace in samples) == [1, 1, 1, 2, 2, 2]
