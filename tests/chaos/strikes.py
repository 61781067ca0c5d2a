"""Faults on cue: who gets which signal, in which phase of which step, and what became of it.

    driver                               victim (a rank)
      step begins: arm  ---- a file ---->  in the middle of the phase: take the file, note the time,
                                           send the signal to itself
      the call fails: note the time
      the step is finished at last: note the time

Everything goes through files in one folder, which ranks find beside the model they load, so it
works for child processes and for actors. A strike is taken by renaming its file: it happens once,
and the step that is repeated after it is left alone.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HANG = 0
"""Instead of a signal: sleep, as a deadlock would."""


@dataclass(frozen=True)
class Strike:
    role: str
    rank: int
    phase: str
    step: int
    number: int = signal.SIGKILL
    stage: str = ""
    """The trainer's stage before which the driver strikes; empty where the victim does it."""

    @property
    def fault(self) -> str:
        return {signal.SIGKILL: "kill -9", signal.SIGSTOP: "SIGSTOP"}.get(self.number, "hang")


class Strikes:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "strikes"
        self.folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def beside(cls, model_path: str) -> "Strikes":
        return cls(Path(model_path).parent)

    # ---- what is to happen -----------------------------------------------------------------------

    def plan(self, strikes: list[Strike]) -> None:
        (self.folder / "plan.json").write_text(json.dumps([asdict(one) for one in strikes]))

    def planned(self) -> list[Strike]:
        return [Strike(**one) for one in json.loads((self.folder / "plan.json").read_text())]

    def arm(self, step: int) -> None:
        for strike in self.planned():
            has_struck = (self.folder / f"{_name(strike)}.struck").exists()
            if strike.step == step and not has_struck:
                (self.folder / _name(strike)).write_text(str(int(strike.number)))

    def strike_from_driver(self, stage: str, step: int) -> None:
        for strike in self.planned():
            if (strike.stage, strike.step) == (stage, step) and self._take(strike) is not None:
                os.kill(self.pid_of(strike.role, strike.rank), strike.number)

    def strike_here(self, role: str, rank: int, phase: str) -> None:
        """Called by the victim in the middle of the phase."""
        number = self._take(Strike(role, rank, phase, step=0))
        if number == HANG:
            time.sleep(600)
        elif number is not None:
            os.kill(os.getpid(), number)

    def _take(self, strike: Strike) -> int | None:
        armed = self.folder / _name(strike)
        struck = armed.with_suffix(".struck")
        try:
            armed.rename(struck)
        except FileNotFoundError:
            return None
        self.note("struck", role=strike.role, rank=strike.rank, phase=strike.phase)
        return int(struck.read_text())

    # ---- what has happened -----------------------------------------------------------------------

    def note(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "time": time.time(), **fields})
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(line + "\n")

    def events(self, kind: str) -> list[dict[str, Any]]:
        file = self.folder / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def pid_of(self, role: str, rank: int) -> int:
        started = self.events("started")
        return next(e["pid"] for e in reversed(started) if (e["role"], e["rank"]) == (role, rank))

    def pids(self) -> list[int]:
        """The processes of ranks, of all attempts; a rank may also be this very process."""
        return [event["pid"] for event in self.events("started") if event["pid"] != os.getpid()]


class Failpoints:
    """Puts a strike into the middle of methods that a rank runs."""

    def __init__(self, model_path: str, role: str, rank: int) -> None:
        self.strikes = Strikes.beside(model_path)
        self.role, self.rank = role, rank
        self.strikes.note("started", role=role, rank=rank, pid=os.getpid())

    def before(self, owner: Any, method: str, phase: str) -> None:
        original = getattr(owner, method)

        def struck(*args: Any, **kwargs: Any) -> Any:
            self.strike(phase)
            return original(*args, **kwargs)

        setattr(owner, method, struck)

    def amid_tensors(self, owner: Any, method: str, phase: str) -> None:
        """Between the first and the second thing that a generator gives."""
        original = getattr(owner, method)

        def struck() -> Iterator[Any]:
            for index, item in enumerate(original()):
                if index == 1:
                    self.strike(phase)
                yield item

        setattr(owner, method, struck)

    def amid_writes(self, owner: Any, method: str, phase: str) -> None:
        """Between the first and the second file that a save writes."""
        original = getattr(owner, method)

        def struck(keep: Callable[..., Any]) -> list[Any]:
            first, *others = original(keep)
            return [first, lambda folder: self.strike(phase), *others]

        setattr(owner, method, struck)

    def strike(self, phase: str) -> None:
        self.strikes.strike_here(self.role, self.rank, phase)


def _name(strike: Strike) -> str:
    return f"{strike.role}-{strike.rank}-{strike.phase.replace(' ', '_')}"


def is_running(pid: int) -> bool:
    """False for what is dead but not yet collected by its parent."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pids: list[int], seconds: float = 60.0) -> list[int]:
    """Those that are still there after that time."""
    end = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return [pid for pid in pids if is_running(pid)]
