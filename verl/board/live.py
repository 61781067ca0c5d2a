"""`RunBoard`: the recording of a run that goes on, its page and its `/metrics` beside it."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from verl.board.prometheus import RunMetrics
from verl.board.recorder import Recorder
from verl.board.serving import Board, board_server, page_address
from verl.board.store import Sample
from verl.protocol.trajectory import Group
from verl.utils.json_server import JsonServer


class RunBoard:
    """Opens with the first step that is recorded: what a store holds of later ones is of an attempt
    that was lost. Without `is_on` nothing is recorded; `metrics` are for Prometheus."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Any,
        *,
        is_on: bool,
        facts: Callable[[], Mapping[str, Any]],
        max_bytes: int,
        metrics: RunMetrics | None = None,
    ) -> None:
        self._metrics = metrics
        self._folder, self._tokenizer = folder, tokenizer
        self._facts, self._max_bytes = facts, max_bytes
        self.is_on = is_on
        self.was_opened = False
        self.foreign_loop = ""
        """The function whose steps are recorded, if it is not our `fit`."""

        self._recorder: Recorder | None = None
        self._server: JsonServer | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether steps are recorded or told to Prometheus."""
        return self.is_on or self._metrics is not None

    def __enter__(self) -> "RunBoard":
        self.was_opened = True
        if self._metrics is not None:
            path = self._metrics.start()
            say(f"metrics for Prometheus: {self._metrics.server.url}/metrics, scraped by {path}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._metrics is not None:
            self._metrics.stop()
        if self._recorder is not None:
            self._recorder.close()
        if self._server is not None:
            self._board.close()
            self._server.stop()
            say(f"reopen the run page: python -m verl.board {self._folder}")

    def add_step(
        self,
        number: int,
        metrics: Mapping[str, Any],
        seconds: Mapping[str, float],
        *,
        batch: Any = None,
        groups: Sequence[Group] = (),
        warnings: Mapping[str, str] | None = None,
    ) -> None:
        if self._metrics is not None:
            self._metrics.add_step(number, metrics, seconds)
        if self.is_on:
            recorder = self._recorder_from(number)
            recorder.add_step(
                number, metrics, seconds, batch=batch, groups=groups, warnings=warnings
            )

    def add_validation(self, step: int, samples: Callable[[], Sequence[Sample]]) -> None:
        if self.is_on:
            self._recorder_from(step).add_validation(samples())

    def _recorder_from(self, step: int) -> Recorder:
        if self._recorder is None:
            self._recorder = Recorder(
                self._folder,
                self._tokenizer,
                facts={**self._facts(), "foreign_loop": self.foreign_loop},
                max_bytes=self._max_bytes,
                first_step=step - 1,
            )
            if self._recorder.process.is_recording:
                self._board = Board([self._recorder.path])
                self._server = board_server(self._board).start()
                say(f"run page: {page_address(self._server)}")
        return self._recorder


def say(text: str) -> None:
    sys.stderr.write(f"note: {text}\n")
