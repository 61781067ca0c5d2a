"""The run page: over HTTP while a run goes on or afterwards, or as one file with its data inside.

    page.html  --POST /api/<question> {...}-->  Board  -->  StoreReader of the run it is about
               <--server-sent events of /api/changes--  when a step has been committed

The server listens on loopback and asks for a token, which stands in the fragment of the address
that is printed: the page reads it there, and no log ever holds it.
"""

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

from verl.board.compare import first_difference
from verl.board.reader import NoStore, StoreReader, declared_metrics, plain, stores_below
from verl.utils.json_server import Events, JsonServer, Refusal

DATA_MARK = "<!-- data -->"
STREAM_SECONDS = 3600
"""How long a stream of changes lasts; the page then asks for the next one."""

MAX_COMPARED = 5
"""Runs of which an exported page has every pair compared."""


class Board:
    """Answers the page's questions about some runs."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """`paths` are stores, folders of runs, or folders with several of them."""
        self._paths = list(paths)
        self._readers: dict[Path, StoreReader] = {}
        self.unreadable: dict[Path, str] = {}
        """Stores that are damaged, of another version or not begun yet, and why."""

        self._is_closed = threading.Event()
        self._find()

    def _find(self) -> list[StoreReader]:
        """A reader for every store, those that were begun meanwhile included."""
        for store in (store for path in self._paths for store in stores_below(path)):
            if store not in self._readers:
                try:
                    self._readers[store] = StoreReader(store)
                    self.unreadable.pop(store, None)
                except NoStore as error:
                    self.unreadable[store] = str(error)
        if self._paths and not self._readers:
            raise NoStore("; ".join(self.unreadable.values()))
        return list(self._readers.values())

    def _run(self, question: Mapping[str, Any], name: str = "run") -> StoreReader:
        number, readers = question.get(name), list(self._readers.values())
        if not isinstance(number, int) or not 0 <= number < len(readers):
            raise Refusal(400, f"{name} is {number!r}; there are runs 0 to {len(readers) - 1}")
        return readers[number]

    def runs(self, question: Mapping[str, Any]) -> Any:
        readers = self._find()
        summaries = [reader.summary() for reader in readers]
        counts = Counter(summary["name"] for summary in summaries)
        folders = [reader.path.resolve().parent for reader in readers]
        for folder, summary in zip(folders, summaries, strict=True):
            if counts[summary["name"]] > 1:  # the folder tells them apart
                summary["name"] += f" ({folder.relative_to(os.path.commonpath(folders))})"
        return summaries

    def metrics(self, question: Mapping[str, Any]) -> Any:
        return declared_metrics()

    def steps(self, question: Mapping[str, Any]) -> Any:
        return self._run(question).steps(int(question.get("after", -1)))

    def events(self, question: Mapping[str, Any]) -> Any:
        return self._run(question).events()

    def samples(self, question: Mapping[str, Any]) -> Any:
        wanted = {name: value for name, value in question.items() if name != "run"}
        try:
            return self._run(question).samples(**wanted)
        except (TypeError, ValueError) as error:
            raise Refusal(400, str(error)) from error

    def sample(self, question: Mapping[str, Any]) -> Any:
        try:
            return self._run(question).sample(int(question["id"]))
        except (KeyError, ValueError) as error:
            raise Refusal(404, str(error)) from error

    def compare(self, question: Mapping[str, Any]) -> Any:
        found = first_difference(self._run(question, "first"), self._run(question, "second"))
        return None if found is None else plain({**asdict(found), "text": str(found)})

    def changes(self, question: Mapping[str, Any]) -> Events:
        """The runs' newest steps, now and whenever there is a newer one."""

        def newest() -> Iterator[Any]:
            told: Any = None
            for _ in range(STREAM_SECONDS):
                now = [reader.summary()["last"] for reader in self._find()]
                yield {"last": now} if now != told else None
                told = now
                if self._is_closed.wait(timeout=1.0):
                    return

        return Events(newest())

    def close(self) -> None:
        """End the streams of changes."""
        self._is_closed.set()

    @property
    def questions(self) -> dict[str, Callable[[Mapping[str, Any]], Any]]:
        return {
            "runs": self.runs,
            "metrics": self.metrics,
            "steps": self.steps,
            "events": self.events,
            "samples": self.samples,
            "sample": self.sample,
            "compare": self.compare,
            "changes": self.changes,
        }

    # ---- one file --------------------------------------------------------------------------------

    def exported(self, max_samples: int) -> str:
        """The page with everything it may ask for inside; of each run samples of every step."""
        readers = self._find()
        numbers = range(len(readers))
        pairs = combinations(numbers, 2) if len(readers) <= MAX_COMPARED else ()
        data = {
            "runs": self.runs({}),
            "metrics": self.metrics({}),
            "steps": [reader.steps() for reader in readers],
            "events": [reader.events() for reader in readers],
            "samples": [list(reader.spread(max_samples)) for reader in readers],
            "differences": {f"{a}-{b}": self.compare({"first": a, "second": b}) for a, b in pairs},
        }
        text = json.dumps(data).replace("<", "\\u003c")  # no tag, and no comment that hides one
        script = f'<script id="data" type="application/json">{text}</script>'
        return page().replace(DATA_MARK, script)


def page() -> str:
    return (files("verl.board") / "page.html").read_text(encoding="utf-8")


def board_server(board: Board, *, host: str = "127.0.0.1", port: int = 0) -> JsonServer:
    """A server that is not started yet; `page_address` is what to open."""
    routes = {
        ("POST", f"/api/{name}"): (lambda body, answer=answer: answer(body or {}))
        for name, answer in board.questions.items()
    }
    return JsonServer(routes, host=host, port=port, pages={"/": page(), "/favicon.ico": ""})


def page_address(server: JsonServer) -> str:
    return f"{server.url}/#token={server.token}"


__all__ = ["Board", "NoStore", "board_server", "page", "page_address"]
