"""Environments that behave well and badly, made by name in their own processes."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from verl.environments import Action, Environment, InvalidAction, Observation


class Echo(Environment):
    """Says what it was told, and a number that `random` draws."""

    def reset(self, row, seed):
        return Observation(text=f"{row.get('topic', 'nothing')} {random.random():.6f}")

    def step(self, action: Action):
        if action == "nonsense":
            raise InvalidAction("say something")
        return Observation(
            text=f"{action} {random.random():.6f}",
            reward=0.5,
            done=action == "stop",
            info={"pid": os.getpid()},
        )


class Bad(Environment):
    """Does on its first step what `how` says."""

    def __init__(self, how, note=None):
        self.how = how
        self.note = note

    async def reset(self, row, seed):
        if self.how == "reset":
            raise OSError("no world today")
        return Observation(text="hello", info={"pid": os.getpid()})

    def step(self, action):
        if self.note is not None:
            note = Path(self.note)
            note.with_suffix(".new").write_text(str(os.getpid()))
            note.with_suffix(".new").rename(note)
        if self.how == "hangs":
            time.sleep(3600)
        if self.how == "forks" and os.fork() == 0:
            return Observation(text="from the fork")
        if self.how == "daemon":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            return Observation(text="started", info={"pid": child.pid})
        return {
            "forks": lambda: Observation(text="from the parent"),
            "raises": lambda: {}["missing"],
            "exits": lambda: os._exit(3),
            "sys.exit": lambda: sys.exit(3),
            "bytes": lambda: Observation(text=b"\xff\xfe"),
            "nothing": lambda: None,
            "nan": lambda: Observation(text="?", reward=float("nan")),
            "role": lambda: Observation(messages=[{"role": "robot", "content": "?"}]),
            "10 MB": lambda: Observation(text="x" * (10 << 20)),
            "100 MB": lambda: Observation(text="x" * (100 << 20)),
            "info": lambda: Observation(text="?", info={"board": "x" * 200_000}),
        }[self.how]()


class Counter:
    """In TRL's form: methods with type hints are tools."""

    def __init__(self, goal: int = 3):
        self.goal = goal

    def reset(self, start: int = 0):
        self.total = start
        self.reward = 0.0
        self.done = False
        return f"Reach {self.goal} from {start}."

    def add(self, number: int, note: str | None = None) -> int:
        """Add to the total.

        Args:
            number: what to add
        """
        self.total += number
        self.reward = float(self.total == self.goal)
        self.done = self.total >= self.goal
        return self.total


def corner_player(observation: str, legal: list[str], rng: random.Random) -> str:
    return legal[0]


class Brief(Environment):
    """Three turns; a turn earns a third if it is at most three letters long."""

    def __init__(self, breaks_every=None):
        self.breaks_every = breaks_every

    def reset(self, row, seed):
        if self.breaks_every and row and seed % self.breaks_every == 0:
            raise OSError("the cable is cut")
        self.left = 3
        self.word = random.choice("abcdefgh")
        return Observation(text=f"go{self.word}")

    def step(self, action: Action):
        self.left -= 1
        return Observation(
            text=f"{self.word}{self.left}" if self.left else None,
            reward=(len(action) <= 3) / 3,
            done=self.left == 0,
            info={"word": self.word},
        )
