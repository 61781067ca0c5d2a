"""An asynchronous run loses the server of its tools in each phase; broken replies train nothing."""

import json
import os
import signal
import socket
import threading
from contextlib import suppress

import pytest

from tests.chaos.test_async_losses import PHASES, Struck
from tests.children import children
from tests.speaking import speaking_model, tool_call
from tests.toy import ROLLOUT, toy_run
from tests.trainer.test_asynchronous import STEPS
from verl.protocol.trajectory import InfraError
from verl.tools.serve import main as serve
from verl.utils.http_json import RequestFailed, request_json

TURNS = f"{ROLLOUT}.multi_turn"
TOKEN = "a" * 32
AWAY_SECONDS = 1.0
TOOL = """
import time
from verl.tools.function_tool import function_tool


@function_tool
def look(what: str) -> str:
    \"\"\"Look something up.\"\"\"
    time.sleep(0.02)
    return f"{what} is seven"
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.endswith("Seven."))
"""


def serve_here(file, port):
    os.environ["VERL_TOOL_SERVER_TOKEN"] = TOKEN
    serve([str(file), "--port", str(port)])


class ToolServer:
    """A process that can be lost and comes back on its port."""

    returning = None

    def __init__(self, file, port):
        self.file, self.port = file, port
        self.start()

    def start(self):
        self.process = children.Process(target=serve_here, args=(self.file, self.port), daemon=True)
        self.process.start()
        url = f"http://127.0.0.1:{self.port}/tools"
        for _ in range(200):
            with suppress(RequestFailed, OSError):
                request_json("GET", url, token=TOKEN, timeout_seconds=1.0, max_response_bytes=10**6)
                return
            threading.Event().wait(0.1)
        raise TimeoutError("the tool server did not start")

    def lose(self, number):
        if self.returning is not None:
            self.returning.join(60)
        os.kill(self.process.pid, number)
        back = self.start if number == signal.SIGKILL else self.wake
        self.returning = threading.Timer(AWAY_SECONDS, back)
        self.returning.start()

    def wake(self):
        os.kill(self.process.pid, signal.SIGCONT)


class LosesTools(Struck):
    server: ToolServer
    lost: list

    def strike(self, phase):
        if PHASES.get(self.global_steps) == phase and phase not in self.struck:
            self.struck.add(phase)
            self.server.lose(self.number)

    def annotate(self, batch, step):
        type(self).lost.extend(t.grade for group in step.groups for t in group.lost)
        for group in step.groups:
            for trajectory in group.trajectories:
                for segment in trajectory.response:
                    text = self.tokenizer.decode(segment.token_ids)
                    self.replies.extend([text] if segment.author == "tool" else [])
        return super().annotate(batch, step)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_tool_server_may_be_lost_in_any_phase(tmp_path, monkeypatch, number):
    monkeypatch.setenv("VERL_TOOL_SERVER_TOKEN", TOKEN)
    speaking_model(tmp_path / "model", [tool_call("look", what="x"), "Seven.", "Eight."])
    for name, text in (("tools.py", TOOL), ("reward.py", REWARD)):
        (tmp_path / name).write_text(text)
    asked = [[{"role": "user", "content": f"What is {n}?"}] for n in range(24)]
    rows = [{"prompt": one, "data_source": "x", "answer": "7"} for one in asked]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = ToolServer(tmp_path / "tools.py", free_port())
    fields = {"seen": [], "struck": set(), "lost": [], "replies": [], "number": number}
    kind = type("LosesTools", (LosesTools,), {**fields, "server": server})
    try:
        steps, trainer = toy_run(
            tmp_path,
            tmp_path / "out",
            f"data.val_files={tmp_path / 'train.jsonl'}",
            "data.max_prompt_length=64",
            "data.max_response_length=192",
            f"{ROLLOUT}.n=8",
            f"{ROLLOUT}.calculate_log_probs=true",
            f"{TURNS}.enable=true",
            f"{TURNS}.tool_server=http://127.0.0.1:{server.port}",
            f"{TURNS}.tool_timeout_seconds=0.4",
            f"{TURNS}.max_assistant_turns=4",
            f"{TURNS}.max_infra_ratio=0.9",
            f"trainer.total_training_steps={STEPS}",
            "trainer.total_epochs=10",
            "async_training.reply_tokens=2",
            "algorithm.rollout_correction.bypass_mode=true",
            "trainer.use_v1=true",
            "trainer.v1.trainer_mode=colocate_async",
            "trainer.v1.colocate_async.num_warmup_batches=2",
            trainer_class=kind,
        )
    finally:
        server.returning.join(60)
        server.process.kill()
    trainer.stop_workers()
    assert kind.struck == set(PHASES.values())
    assert len([step for step in steps if "critic/score/mean" in step]) == STEPS
    assert any("x is seven" in reply for reply in kind.replies)
    if number == signal.SIGKILL:  # calls that could not be sent wait until it is back
        assert all("x is seven" in reply for reply in kind.replies), "no broken reply is trained on"
    assert all(isinstance(grade, InfraError) for grade in kind.lost), "what was lost has no score"
