"""Runs saves in another process while strace kills it, or makes its system calls fail.

test                      server (saver.py)              child
request ----------------> fork ------------------------> "pid"
attach strace to pid                                      waits
"go" ---------------------------------------------------> saves, "committed" or "failed"
                          waits for the child <---------- exits, or is killed
<------------------------ "status"
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.utils.checkpoint.saver import contents
from verl.utils.checkpoint.store import find_intact
from verl.utils.checkpoint.tensor_store import load_state

TIMEOUT_SECONDS = 60


@dataclass
class Outcome:
    committed: list[int]
    failed: list[dict]
    was_killed: bool


class StraceRefusedError(Exception):
    """This machine does not let one process trace another."""


class Rig:
    """One server, and a checkpoint root in memory that each case starts from."""

    def __init__(self, channel: socket.socket, folder: Path) -> None:
        self.channel = channel
        self.channel.settimeout(TIMEOUT_SECONDS)
        self.pristine = folder / "pristine"
        self.root = folder / "root"
        self.pristine.mkdir()

    def reset(self) -> None:
        """Step 1, version 0, committed."""
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.pristine, self.root)

    def save(self, steps, version, *, strace=(), root=None) -> Outcome:
        request = {"root": str(root or self.root), "steps": steps, "version": version}
        self.channel.send(json.dumps(request).encode())
        tracer = self._attach(self._hear()["pid"], strace) if strace else None
        self.channel.send(b"go")
        outcome = Outcome([], [], False)
        while "status" not in (word := self._hear()):
            if "committed" in word:
                outcome.committed.append(word["committed"])
            elif "failed" in word:
                outcome.failed.append(word)
        outcome.was_killed = word["status"] == signal.SIGKILL
        assert outcome.was_killed or word["status"] == 0
        if tracer:
            tracer.communicate(timeout=TIMEOUT_SECONDS)
        return outcome

    def count_calls(self, steps, version) -> Counter[str]:
        """How often an undisturbed save makes each system call."""
        self.reset()
        trace = self.root.parent / "trace"
        self.save(steps, version, strace=["-e", "signal=none", "-o", str(trace)])
        calls = Counter(re.findall(r"^(\w+)\(", trace.read_text(), re.MULTILINE))
        del calls["recvfrom"]  # the word that starts it; a kill there leaves it unheard
        return calls

    def holds(self, step, version) -> bool:
        """Whether a resumed run finds exactly that, every tensor of it."""
        found = find_intact(self.root)
        assert found is not None
        state = load_state(found.path / "actor", "optimizer")
        expected = contents(found.step, state["version"])
        assert state["step"] == found.step
        assert all(map(torch.equal, state["moments"], expected["moments"]))
        assert json.loads((found.path / "data.json").read_text()) == {"cursor": found.step}
        return (found.step, state["version"]) == (step, version)

    def names(self) -> set[str]:
        return {path.name for path in self.root.iterdir()}

    def _hear(self) -> dict:
        return json.loads(self.channel.recv(1 << 16))

    def _attach(self, pid, options):
        command = ["strace", "-o", os.devnull, *options, "-p", str(pid)]
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        line = tracer.stderr.readline()
        if "attached" not in line:
            tracer.kill()
            tracer.communicate(timeout=TIMEOUT_SECONDS)
            raise StraceRefusedError(f"strace may not attach to processes here: {line}")
        return tracer


@contextmanager
def running_rig():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.utils.checkpoint.saver", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    theirs.close()
    with tempfile.TemporaryDirectory(dir=memory) as folder, ours:
        try:
            rig = Rig(ours, Path(folder))
            assert rig.save([1], 0, root=rig.pristine).committed == [1]
            yield rig
        finally:
            server.kill()
            server.wait(timeout=TIMEOUT_SECONDS)
