"""Reading the stores of runs: what the page, its export and comparisons ask for.

Every answer is plain JSON. A store is opened for reading only, so a run that goes on is not
disturbed; its newest committed step is there at the next question.
"""

import json
import math
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from verl.board.store import BUSY_SECONDS, FILE_NAME, VERSION, Sample
from verl.utils.metric.declared import SECTIONS

MAX_LISTED = 200
SORTS = {
    "newest": "step DESC, id",
    "oldest": "step, id",
    "best": "score DESC, id",
    "worst": "score, id",
    "longest": "tokens DESC, id",
    "shortest": "tokens, id",
    "advantage": "advantage DESC, id",
}
LISTED = "id, step, phase, uid, prompt, response, truth, source, score, turns, tokens, advantage"


class NoStore(ValueError):
    """The folder holds no run that was recorded."""


def stores_below(path: Path) -> list[Path]:
    """The store that `path` is or holds, or all below it."""
    if path.is_file():
        return [path]
    found = sorted(path.rglob(FILE_NAME)) if path.is_dir() else []
    if not found:
        raise NoStore(
            f"{path} holds no {FILE_NAME}; a run writes one into trainer.default_local_dir with "
            "trainer.board=True"
        )
    return found


class StoreReader:
    """Answers about one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = self._rows("SELECT name, value FROM facts")
        self.facts: dict[str, Any] = {name: json.loads(value) for name, value in rows}
        if self.facts.get("version") != VERSION:
            raise NoStore(
                f"{path} has version {self.facts.get('version')} of the format; this verl reads "
                f"version {VERSION}"
            )

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        address = f"file:{self.path.resolve().as_posix().replace('?', '%3f')}?mode=ro"
        try:
            with closing(sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS)) as connection:
                connection.create_function("lowered", 1, str.lower, deterministic=True)
                return connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise NoStore(f"{self.path} cannot be read as the store of a run: {error}") from error

    @property
    def name(self) -> str:
        return str(self.facts.get("name", self.path.parent.name))

    def summary(self) -> dict[str, Any]:
        ((last, num_steps),) = self._rows("SELECT MAX(step), COUNT(*) FROM steps")
        ((num_samples,),) = self._rows("SELECT COUNT(*) FROM samples")
        return {
            "name": self.name,
            "started": self.facts.get("started"),
            "total": self.facts.get("total_steps"),
            "settings": plain(self.facts.get("settings", {})),
            "last": last,
            "steps": num_steps,
            "samples": num_samples,
        }

    def steps(self, after: int = -1) -> list[dict[str, Any]]:
        """Number, time, metrics and where the seconds went, of the steps after `after`."""
        rows = self._rows(
            "SELECT step, time, metrics, seconds FROM steps WHERE step > ? ORDER BY step", after
        )
        return [
            {"step": n, "time": t, "metrics": json.loads(m), "seconds": json.loads(s)}
            for n, t, m, s in rows
        ]

    def recorded_batch(self, step: int) -> tuple[dict[str, Any], list[Sample]]:
        """What `recorder.batch_facts` kept of a step, and its trained samples, bit for bit."""
        facts = self._rows("SELECT batch FROM steps WHERE step = ?", step)
        rows = self._rows(
            "SELECT id, uid, truth, source, score, turns, extras, prompt_ids, response_ids"
            " FROM samples WHERE step = ? AND phase = 'train' ORDER BY id",
            step,
        )
        columns: dict[int, dict[str, np.ndarray]] = {}
        for sample, name, data in self._rows(
            "SELECT sample, name, data FROM columns WHERE sample IN"
            " (SELECT id FROM samples WHERE step = ? AND phase = 'train')",
            step,
        ):
            columns.setdefault(sample, {})[name] = np.frombuffer(data, "<f4")
        return json.loads(facts[0][0]) if facts else {}, [
            Sample(
                uid=uid,
                prompt="",
                response="",
                truth=truth,
                source=source,
                score=score,
                turns=turns,
                extras=json.loads(extras),
                prompt_ids=np.frombuffer(prompt, "<i4").tolist(),
                response_ids=np.frombuffer(response, "<i4").tolist(),
                columns=columns.get(number, {}),
            )
            for number, uid, truth, source, score, turns, extras, prompt, response in rows
        ]

    def events(self) -> list[dict[str, Any]]:
        rows = self._rows("SELECT step, time, kind, text FROM events ORDER BY id")
        return [dict(zip(("step", "time", "kind", "text"), row, strict=True)) for row in rows]

    def samples(
        self,
        *,
        step: int | None = None,
        phase: str | None = None,
        text: str = "",
        sort: str = "newest",
        offset: int = 0,
        limit: int = 50,
    ) -> dict[str, Any]:
        """One line per sample, with the number of all that fit."""
        if sort not in SORTS:
            raise ValueError(f"sort is {sort!r}; it must be one of: {', '.join(SORTS)}")
        conditions, values = ["1"], []
        for name, value in (("step", step), ("phase", phase)):
            if value is not None:
                conditions.append(f"{name} = ?")
                values.append(value)
        if text.isascii() and text:
            conditions.append("(prompt LIKE ? ESCAPE '\\' OR response LIKE ? ESCAPE '\\')")
            pattern = re.sub(r"([%_\\])", r"\\\1", text)
            values += [f"%{pattern}%"] * 2
        elif text:  # LIKE ignores the case of ASCII alone, and is six times as fast
            conditions.append("(instr(lowered(prompt), ?) OR instr(lowered(response), ?))")
            values += [text.lower()] * 2
        where = " AND ".join(conditions)
        query = f"SELECT id FROM samples WHERE {where} ORDER BY {SORTS[sort]}"
        ids = [number for (number,) in self._rows(query, *values)]
        offset, count = max(0, offset), len(ids)
        ids = ids[offset : offset + max(0, min(limit, MAX_LISTED))]
        rows = self._rows(
            f"SELECT {LISTED} FROM samples WHERE id IN ({','.join('?' * len(ids))})"
            f" ORDER BY {SORTS[sort]}",
            *ids,
        )
        names = LISTED.split(", ")
        return {"count": count, "rows": [dict(zip(names, plain(row), strict=True)) for row in rows]}

    def sample(self, number: int, digits: int | None = 5) -> dict[str, Any]:
        """One sample with all of its tokens: texts, and a number for each in every column, rounded
        to so many digits and `plain` for the page; None gives what was stored."""
        query = f"SELECT {LISTED}, extras, prompt_ids, response_ids FROM samples WHERE id = ?"
        rows = self._rows(query, number)
        if not rows:
            raise ValueError(f"there is no sample {number}; retention may have removed it")
        *listed, extras, prompt_ids, response_ids = rows[0]
        columns = self._rows("SELECT name, data FROM columns WHERE sample = ?", number)
        prompt, response = (
            np.frombuffer(ids, "<i4").tolist() for ids in (prompt_ids, response_ids)
        )
        texts = self.vocabulary({*prompt, *response})
        sample = {
            **dict(zip(LISTED.split(", "), listed, strict=True)),
            "extras": json.loads(extras),
            "prompt_tokens": [[token, texts[token]] for token in prompt],
            "tokens": [[token, texts[token]] for token in response],
            "columns": {
                name: values if digits is None else [round(value, digits) for value in values]
                for name, values in (
                    (name, np.frombuffer(data, "<f4").tolist()) for name, data in columns
                )
            },
        }
        return sample if digits is None else plain(sample)

    def vocabulary(self, ids: set[int]) -> dict[int, str]:
        marks = ",".join("?" * len(ids))
        rows = self._rows(f"SELECT id, text FROM vocabulary WHERE id IN ({marks})", *ids)
        return dict(rows)

    def spread(self, max_samples: int) -> Iterator[dict[str, Any]]:
        """Samples of every step and phase, equally many of each, the first ones of the batch."""
        ((num_parts,),) = self._rows(
            "SELECT COUNT(*) FROM (SELECT 1 FROM samples GROUP BY step, phase)"
        )
        rows = self._rows(
            "SELECT id FROM (SELECT id, ROW_NUMBER() OVER (PARTITION BY step, phase ORDER BY id)"
            " AS place FROM samples) WHERE place <= ? ORDER BY id",
            max(1, max_samples // max(1, num_parts)),
        )
        return (self.sample(number) for (number,) in rows)

    def trained(self, step: int) -> Iterator[dict[str, Any]]:
        """The trained samples of a step in the order of the batch, their columns as stored."""
        rows = self._rows(
            "SELECT id FROM samples WHERE step = ? AND phase = 'train' ORDER BY id", step
        )
        return (self.sample(number, digits=None) for (number,) in rows)


def plain(value: Any) -> Any:
    """As JSON has it: NaN and infinity become strings, as `plain_numbers` stores them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def one_run(path: Path) -> StoreReader:
    """The only run below a path."""
    stores = stores_below(path)
    if len(stores) > 1:
        names = ", ".join(str(store.parent) for store in stores[:5])
        raise NoStore(f"{path} holds {len(stores)} runs ({names}); name one of them")
    return StoreReader(stores[0])


def declared_metrics() -> list[Mapping[str, str]]:
    """Name, unit and meaning of every metric, for the page's captions."""
    return [
        {"name": metric.name, "unit": metric.unit, "meaning": metric.meaning}
        for section in SECTIONS
        for metric in section.metrics
    ]
