"""Every command of docs/gsm8k.md runs, in its order, with a tiny model and few steps."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer
from verl.utils.dataset.prompts import CHATML

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gsm8k.md"
TOKEN = "a-token-of-this-test-0123456789"
SECONDS = 300
LITTLE = {
    "verl.trainer.fsdp_sft_trainer": (
        "data.train_batch_size=4 data.micro_batch_size_per_gpu=4 trainer.total_training_steps=2 "
        "trainer.device=cpu trainer.logger=[]"
    ),
    "verl.trainer.main_ppo": (
        "data.train_batch_size=4 data.max_response_length=16 trainer.total_training_steps=2 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=4 trainer.test_freq=2 trainer.save_freq=2 "
        "trainer.device=cpu trainer.logger=[]"
    ),
    "verl.trainer.main_generation": "data.n_samples=2 rollout.response_length=16",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [block.replace("\\\n", " ").strip() for block in blocks]


def little(command: str) -> str:
    """The command with the sizes of this test; what the page sets otherwise is replaced."""
    words = shlex.split(command)
    module = words[2] if words[1] == "-m" else ""
    changes = shlex.split(LITTLE.get(module, ""))
    keys = {change.partition("=")[0] for change in changes}
    return shlex.join([*(w for w in words if w.partition("=")[0] not in keys), *changes])


@pytest.fixture
def place(tmp_path):
    """A home with a tiny model and raw problems, and the variables of a shell in it."""
    model = tmp_path / "models" / "SmolLM2-135M-Instruct"
    tiny_model("llama").save_pretrained(model)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(model)
    raw = tmp_path / "raw"
    raw.mkdir()
    for name, first in (("train", 0), ("test", 50)):
        rows = [
            {"question": f"What is {n}+1?", "answer": f"{n}+1={n + 1}\n#### {n + 1}"}
            for n in range(first, first + 16)
        ]
        (raw / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path, {
        **os.environ,
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "VERL_SERVER_TOKEN": TOKEN,
        "HYDRA_FULL_ERROR": "1",
    }


def run(command, folder, env):
    found = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert found.returncode == 0, f"{command}\n{found.stdout[-3000:]}\n{found.stderr[-5000:]}"
    return found.stdout


def asked(address, body=None):
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(address, data=data, headers=headers), timeout=60
    ) as reply:
        return json.loads(reply.read())


def served(command, folder, env):
    """Start the server, ask it once, and end it."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    rollout = "actor_rollout_ref.rollout"
    sizes = f"{rollout}.prompt_length=64 {rollout}.response_length=16 trainer.device=cpu"
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command} {rollout}.server.port={port} {sizes}"], cwd=folder, env=env
    )
    try:
        models, deadline = None, time.monotonic() + SECONDS
        while models is None and process.poll() is None and time.monotonic() < deadline:
            threading.Event().wait(0.5)
            try:
                models = asked(f"http://127.0.0.1:{port}/v1/models")["data"]
            except OSError:
                continue
        assert models, "the server did not start"
        answer = asked(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            {"model": models[0]["id"], "messages": [{"role": "user", "content": "1+1?"}]},
        )
        return answer["choices"][0]["message"]["content"]
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_the_page_goes_from_the_data_to_a_served_model(place):
    folder, env = place
    said = {}
    for command in commands():
        command = re.sub(
            r"global_step_\d+", "global_step_2", command.replace("$HOME/", f"{folder}/")
        )
        if "gsm8k.py" in command:
            command += f" --local_dataset_path {folder / 'raw'}"
        if "main_generation_server" in command:
            assert isinstance(served(command, folder, env), str)
            continue
        if command.startswith("python"):
            command = little(command)
        said[command.split()[2] if "-m" in command else command[:10]] = run(command, folder, env)
    assert "openai/gsm8k" in said["verl.trainer.main_eval"]
    assert (folder / "runs/gsm8k/merged/config.json").is_file()
    assert (folder / "runs/gsm8k/ppo/global_step_2/critic").is_dir()
    assert len(commands()) == 9
