"""`board.sqlite` beside the checkpoints of a run: steps, samples, tokens, events.

    trainer                      writer process                    readers
      hands a step over  ---->     one transaction per step  ---->   see committed steps only
      never waits                  retention by size                 (write-ahead log)

A step that is committed is there after kill -9. When the file grows beyond its limit, samples of
the oldest steps go first; metrics stay. How steps come here is `verl.board.process`.

Token columns are little-endian arrays: ids int32, everything else float32, one entry per token.
"""

import json
import math
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FILE_NAME = "board.sqlite"
VERSION = 2
BUSY_SECONDS = 10.0
KEPT_SHARE = 0.8
"""Part of the limit to which retention brings the file down."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS steps (
    step INTEGER PRIMARY KEY, time REAL, metrics TEXT, seconds TEXT, batch TEXT
);
CREATE TABLE IF NOT EXISTS samples (
    id INTEGER PRIMARY KEY, step INTEGER, phase TEXT, uid TEXT, prompt TEXT, response TEXT,
    truth TEXT, source TEXT, score REAL, turns INTEGER, tokens INTEGER, advantage REAL,
    extras TEXT, prompt_ids BLOB, response_ids BLOB
);
CREATE INDEX IF NOT EXISTS samples_of_step ON samples (step, phase);
CREATE TABLE IF NOT EXISTS columns (
    sample INTEGER, name TEXT, data BLOB, PRIMARY KEY (sample, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS vocabulary (id INTEGER PRIMARY KEY, text TEXT);
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, step INTEGER, time REAL, kind TEXT, text TEXT
);
"""


@dataclass(kw_only=True)
class Sample:
    """One response as it was trained on or validated with."""

    uid: str
    prompt: str
    response: str
    phase: str = "train"
    truth: str = ""
    source: str = ""
    score: float | None = None
    turns: int = 1
    extras: Mapping[str, Any] = field(default_factory=dict)
    prompt_ids: Sequence[int] | np.ndarray = ()
    response_ids: Sequence[int] | np.ndarray = ()
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """(T,) of each response token: `mask`, `log_prob`, `advantage`, `entropy`, `version`, ..."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step reported, and its samples."""

    number: int
    metrics: Mapping[str, float | str]
    """As `plain_numbers` makes them; `seconds`, too."""

    seconds: Mapping[str, float | str]
    """Where its time went; the entries add up to its wall time."""

    batch: Mapping[str, Any] = field(default_factory=dict)
    """What its rows have in common, or beside their tokens: see `recorder.batch_facts`."""

    samples: Sequence[Sample] = ()
    events: Sequence[tuple[str, str]] = ()
    """(kind, text) each."""

    time: float = field(default_factory=time.time)


class StoreWriter:
    """The only one who writes; `decode` gives the text of one token id."""

    def __init__(
        self,
        folder: Path,
        *,
        facts: Mapping[str, Any],
        decode: Callable[[int], str],
        max_bytes: int,
        first_step: int = 0,
    ) -> None:
        """`facts` describe the run. Steps after `first_step` are of an attempt that was lost."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE_NAME
        self._decode = decode
        self._max_bytes = max_bytes
        self._known_ids = np.empty(0, dtype=np.int64)
        self._connection = connect(self.path)
        self._prepare(facts, first_step)

    def close(self) -> None:
        self._connection.close()

    def _prepare(self, facts: Mapping[str, Any], first_step: int) -> None:
        connection = self._connection
        with connection:
            connection.executescript(SCHEMA)
            for table in ("steps", "samples", "events"):
                connection.execute(f"DELETE FROM {table} WHERE step > ?", (first_step,))
            connection.execute("DELETE FROM columns WHERE sample NOT IN (SELECT id FROM samples)")
            entries = {"version": VERSION, "started": time.time(), **facts}
            connection.executemany(
                "INSERT OR REPLACE INTO facts VALUES (?, ?)",
                [(name, json.dumps(value)) for name, value in entries.items()],
            )
            rows = connection.execute("SELECT id FROM vocabulary ORDER BY id").fetchall()
            self._known_ids = np.array([row[0] for row in rows], dtype=np.int64)
            ((last,),) = connection.execute("SELECT MAX(id) FROM samples")
            self._num_samples = int(last or 0)

    def add(self, step: Step) -> None:
        """Write a step; it is committed on return."""
        connection, samples = self._connection, step.samples
        with connection:
            described = map(json.dumps, (step.metrics, step.seconds, step.batch))
            connection.execute(
                "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?)",
                (step.number, step.time, *described),
            )
            connection.executemany(
                "INSERT INTO events (step, time, kind, text) VALUES (?, ?, ?, ?)",
                [(step.number, step.time, kind, text) for kind, text in step.events],
            )
            first, self._num_samples = self._num_samples + 1, self._num_samples + len(samples)
            numbered = list(enumerate(samples, start=first))
            connection.executemany(
                "INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(number, step.number, *sample_row(sample)) for number, sample in numbered],
            )
            connection.executemany(
                "INSERT INTO columns VALUES (?, ?, ?)",
                [
                    (number, name, np.asarray(values, dtype="<f4").tobytes())
                    for number, sample in numbered
                    for name, values in sample.columns.items()
                ],
            )
            ids = [np.asarray(row, int) for s in samples for row in (s.prompt_ids, s.response_ids)]
            new = np.setdiff1d(np.concatenate([np.empty(0, int), *ids]), self._known_ids)
            connection.executemany(
                "INSERT OR IGNORE INTO vocabulary VALUES (?, ?)",
                [(token, self._decode(token)) for token in new.tolist()],
            )
        self._known_ids = np.union1d(self._known_ids, new)
        self._keep_within_limit()

    def _keep_within_limit(self) -> None:
        connection = self._connection
        size = _pragma(connection, "page_size")
        used = (_pragma(connection, "page_count") - _pragma(connection, "freelist_count")) * size
        if used <= self._max_bytes:
            return
        steps = [
            row[0] for row in connection.execute("SELECT DISTINCT step FROM samples ORDER BY 1")
        ]
        excess = (used - KEPT_SHARE * self._max_bytes) / max(used, 1)
        num_old = max(1, min(len(steps) - 1, round(excess * len(steps))))
        if len(steps) < 2:
            return
        last = steps[num_old - 1]
        text = f"samples up to step {last} were removed: the file has reached its limit"
        with connection:
            connection.execute(
                "DELETE FROM columns WHERE sample IN (SELECT id FROM samples WHERE step <= ?)",
                (last,),
            )
            connection.execute("DELETE FROM samples WHERE step <= ?", (last,))
            connection.execute(
                "INSERT INTO events (step, time, kind, text) VALUES (?, ?, 'retention', ?)",
                (steps[-1], time.time(), text),
            )
        connection.execute("PRAGMA incremental_vacuum").fetchall()


def connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS)
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def sample_row(sample: Sample) -> tuple[Any, ...]:
    """The columns of table `samples` after id and step."""
    mask, advantage = (sample.columns.get(name) for name in ("mask", "advantage"))
    mean = None
    if advantage is not None and mask is not None:
        trained = advantage[mask != 0]
        mean = float(trained.sum()) / len(trained) if len(trained) else None
    return (
        sample.phase,
        sample.uid,
        sample.prompt,
        sample.response,
        sample.truth,
        sample.source,
        sample.score,
        sample.turns,
        len(sample.response_ids),
        mean,
        json.dumps(sample.extras, default=str),
        np.asarray(sample.prompt_ids, dtype="<i4").tobytes(),
        np.asarray(sample.response_ids, dtype="<i4").tobytes(),
    )


def plain_numbers(values: Mapping[str, Any]) -> dict[str, float | str]:
    """What is a number, as JSON has it; NaN and infinity as strings that `float` reads back."""
    found: dict[str, float | str] = {}
    for name, value in values.items():
        if isinstance(value, bool | int | float | np.number):
            number = float(value)
            found[name] = number if math.isfinite(number) else str(number)
    return found


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])
