"""The run of a soak: its reward function, its processes, and what can be seen of them."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.strikes import wait_until_gone
from tests.toy import ACTOR, ROLLOUT, toy_overrides

REPOSITORY = Path(__file__).parents[2]
REWARD = """
import json, time, urllib.request
from verl.utils.sandbox import Limits, Sandbox, SandboxError

PROGRAM = "import sys; print(sum(letter == '7' for letter in sys.stdin.read()))"

def with_retries(call, kinds):
    for attempt in range(40):
        try:
            return call()
        except kinds:
            time.sleep(0.25)
    return call()

def in_sandbox(text):
    result = Sandbox(limits=Limits(timeout_seconds=20.0)).run(PROGRAM, stdin=text.encode())
    if not result.is_finished:  # somebody killed it
        raise SandboxError(result.status)
    return int(result.stdout) / 8

def over_http(text):
    body = json.dumps({{"text": text}}).encode()
    with urllib.request.urlopen("http://127.0.0.1:{port}", data=body, timeout=5) as answer:
        return float(json.load(answer)["score"])

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    text = solution_str.replace(" ", "")
    if extra_info["index"] % 2:
        return with_retries(lambda: in_sandbox(text), SandboxError)
    return with_retries(lambda: over_http(text), (OSError, ValueError, KeyError))
"""
SERVICE = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
        body = json.dumps({"score": text.count("7") / 8}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
CHANGES = (
    "trainer.n_gpus_per_node=2",
    "trainer.controller=local",
    f"{ROLLOUT}.name=native_process",
    f"{ACTOR}.fsdp_config.sharding=zero1",
    f"{ACTOR}.checkpoint.async_save=true",
    f"{ACTOR}.optim.lr=0.0005",
    "reward_model.reward_manager=prime",
    "trainer.save_freq=2",
    "trainer.max_actor_ckpt_to_keep=3",
    "trainer.max_restarts=100000",
    "trainer.total_epochs=1000000",
    "trainer.test_freq=-1",
)
IGNORED = (
    *("timing", "perf/", "agent_loop/", "tripwire/", "reward/num_errors"),
    *("rollout/engine_restarts", "rollout/redispatched", "rollout/canary"),
)


# ---- looking at processes ------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    command: str


def processes() -> dict[int, Process]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
            if fields[0] != "Z":
                found[int(folder.name)] = Process(int(folder.name), int(fields[1]), command)
    return found


def below(root: int, everyone: dict[int, Process]) -> list[Process]:
    """The descendants of a process."""
    found, parents = [], {root}
    while parents:
        children = [one for one in everyone.values() if one.parent in parents]
        found += children
        parents = {one.pid for one in children}
    return found


def kind_of(process: Process, controller: int, everyone: dict[int, Process]) -> str | None:
    """What a descendant of the controller does; None for what is not struck."""
    command = process.command
    parent = everyone.get(process.parent)
    if "rollout.process.host" in command:
        return "engine"
    if "jail.supervisor" in command:
        return "sandbox"
    if "local.fork_server" in command:
        is_rank = parent is not None and "local.fork_server" in parent.command
        return "rank" if is_rank else "fork server of ranks"
    if "main_ppo" in command:
        return "fork server of rewards" if process.parent == controller else "reward worker"
    return None


def sample_of(pid: int) -> dict[str, float] | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        return {
            "memory_mb": int(lines["VmRSS"].split()[0]) / 1024,
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": int(lines["Threads"]),
            "shared_mb": shared_megabytes(),
        }
    except (OSError, KeyError):  # it has just ended
        return None


def shared_megabytes() -> float:
    sizes = 0
    for path in Path("/dev/shm").glob("verl-*"):
        with suppress(OSError):
            sizes += path.stat().st_size
    return sizes / 2**20


# ---- the run -------------------------------------------------------------------------------------


class Service:
    """The grading service, a process of its own on one port."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", SERVICE, str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def strike(self) -> bool:
        self.close()
        self.start()
        return True

    def close(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)
        if self.process.stdout is not None:
            self.process.stdout.close()


@dataclass
class Run:
    """The training command in a folder, and what was seen of it."""

    toy: Path
    output: Path
    variables: dict[str, str]
    samples: list[dict[str, Any]] = field(default_factory=list)
    num_lives: int = 0
    process: "subprocess.Popen[bytes] | None" = None
    seen: set[int] = field(default_factory=set)

    def launch(self, num_steps: int) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        self.num_lives += 1
        command = [
            sys.executable,
            "-m",
            "verl.trainer.main_ppo",
            *toy_overrides(self.toy, self.output),
        ]
        changes = [*CHANGES, f"trainer.total_training_steps={num_steps}"]
        with (self.output / "output.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *changes],
                cwd=REPOSITORY,
                env={**os.environ, **self.variables, "VERL_FILE_LOGGER_PATH": str(self.metrics)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def metrics(self) -> Path:
        return self.output / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.output / "checkpoints"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def code(self) -> int | None:
        assert self.process is not None
        return self.process.poll()

    def steps(self) -> dict[int, dict[str, Any]]:
        """What the last life to report each step said of it."""
        lines = self.metrics.read_bytes().splitlines() if self.metrics.exists() else []
        found = {}
        for line in lines:
            with suppress(ValueError):  # a line that a kill has cut
                entry = json.loads(line)
                found[entry["step"]] = {
                    name: value
                    for name, value in entry["data"].items()
                    if not name.startswith(IGNORED)
                }
        return found

    def last_step(self) -> int:
        return max(self.steps(), default=0)

    def committed(self) -> int:
        tracker = self.checkpoints / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0

    def look(self) -> None:
        """Remember what the processes of this life are like."""
        sample = sample_of(self.pid)
        children = below(self.pid, processes())
        self.seen |= {child.pid for child in children}
        if sample is not None:
            num_steps = self.last_step()
            self.samples.append(
                {"time": time.monotonic(), "life": self.num_lives, "step": num_steps, **sample}
            )

    def left(self) -> list[int]:
        """Processes of a life that has ended and should be gone."""
        left = wait_until_gone(sorted(self.seen), 15.0)
        self.seen.clear()
        return left
