"""`ray job submit` with the runtime environment of the repository runs a training command."""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.toy import toy_overrides, toy_run
from tests.trainer.test_ranks import assert_same_run
from verl.utils.environment import temp_env_var

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).parent / "ray")
START_SECONDS, JOB_SECONDS = 300, 240


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def head():
    """The job server of a cluster that only this test knows the token of, and nobody else joins."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # sockets need short names
        yield from run_head(Path(folder))


def run_head(folder):
    port, token = free_port(), folder / "token"
    token.write_text(secrets.token_hex(24))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with (
        temp_env_var("PATH", path),
        temp_env_var("RAY_AUTH_MODE", "token"),
        temp_env_var("RAY_AUTH_TOKEN_PATH", str(token)),
        (folder / "log").open("w") as log,
    ):
        command = [RAY, "start", "--head", "--block", "--disable-usage-stats", "--num-gpus=0"]
        command += ["--node-ip-address=127.0.0.1", f"--port={free_port()}", "--num-cpus=12"]
        command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={port}"]
        command += ["--object-store-memory=200000000", f"--temp-dir={folder}"]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_started(process, folder / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=60)


def wait_until_started(process, log):
    deadline = time.monotonic() + START_SECONDS
    while "Ray runtime started" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)


def test_a_submitted_job_trains_as_this_process_does(toy, tmp_path, head):
    metrics = tmp_path / "job" / "metrics.jsonl"
    metrics.parent.mkdir()
    train = ["env", f"VERL_FILE_LOGGER_PATH={metrics}", "python", "-m", "verl.trainer.main_ppo"]
    train += [*toy_overrides(toy, metrics.parent), "trainer.controller=ray"]
    submit = [RAY, "job", "submit", f"--address={head}"]
    submit += ["--runtime-env=verl/trainer/runtime_env.yaml", "--", *train]
    deadline = time.monotonic() + START_SECONDS
    while True:  # the agent that takes jobs joins some time after the cluster has started
        done = subprocess.run(
            submit, cwd=ROOT, capture_output=True, text=True, timeout=JOB_SECONDS, check=False
        )
        if "No available agent" not in done.stderr or time.monotonic() > deadline:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    found = [{"step": line["step"], **line["data"]} for line in lines]
    expected, _ = toy_run(toy, tmp_path / "here")
    assert_same_run(found, expected)
