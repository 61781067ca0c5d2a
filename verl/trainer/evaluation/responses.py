"""The responses of a file, one task each.

A row has a prompt's responses (a list, or one text), its data source and its answer. What is
missing in one row makes that row unscored, with the reason; a column that is missing altogether is
an error, because then every row would be.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from verl.config.generation import EvaluationDataConfig
from verl.utils.dataset.quarantine import ANSWER_COLUMNS, ground_truth_of
from verl.utils.dataset.tables import BadRow, DataError, Row, open_table

NO_SOURCE = "unknown"


@dataclass(frozen=True)
class Task:
    """One response; `row` and `number` (the response within its row) count from 1."""

    row: int
    number: int
    data_source: str
    response: str
    ground_truth: Any


@dataclass(frozen=True)
class Unscored:
    """A response without a score; `number` is None where a whole row has none."""

    row: int
    number: int | None
    data_source: str
    reason: str


class ResponseFile:
    """Iterating gives a `Task` for each response, and an `Unscored` where that is impossible.

    `needs_answer` says that the reward function cannot do without the right answer, so that a row
    without one is unscored rather than compared with nothing.
    """

    def __init__(self, config: EvaluationDataConfig, *, needs_answer: bool) -> None:
        self._config = config
        self._needs_answer = needs_answer
        self._table = open_table(config.path)
        self.num_rows = len(self._table)
        self._check_columns()

    def __iter__(self) -> Iterator[Task | Unscored]:
        for place, row in enumerate(self._rows(), start=1):
            if isinstance(row, BadRow):
                yield Unscored(place, None, NO_SOURCE, row.reason)
            else:
                yield from self._tasks(place, row)

    def _rows(self) -> Iterator[Row]:
        config = self._config
        keys = (config.response_key, config.data_source_key, config.reward_model_key)
        return self._table.scan({*keys, *ANSWER_COLUMNS})

    def _tasks(self, place: int, row: Mapping[str, Any]) -> Iterator[Task | Unscored]:
        config = self._config
        source = str(row.get(config.data_source_key) or NO_SOURCE)
        responses = row.get(config.response_key)
        answer = ground_truth_of({**row, "reward_model": row.get(config.reward_model_key)})
        fault = self._fault(responses, answer)
        if fault is not None:
            yield Unscored(place, None, source, fault)
            return
        for number, response in enumerate(as_list(responses), start=1):
            if isinstance(response, str):
                yield Task(place, number, source, response, answer)
            else:
                kind = type(response).__name__
                yield Unscored(place, number, source, f"the response is {kind}, not text")

    def _fault(self, responses: Any, answer: Any) -> str | None:
        key = self._config.response_key
        if responses is None or len(as_list(responses)) == 0:
            return f"there are no responses in {key!r}"
        if answer is None and self._needs_answer:
            return f"there is no ground_truth in {self._config.reward_model_key!r}"
        return None

    def _check_columns(self) -> None:
        rows = (row for file in self._table.files for row in file)
        first = next((row for row in rows if isinstance(row, dict)), None)
        if first is None:
            raise DataError(f"{self._config.path} (data.path) has no row that can be read")
        for option in ("response_key", "data_source_key"):
            name = self._config[option]
            if name not in first:
                close = get_close_matches(name, first, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise DataError(
                    f"{self._config.path} has no column {name!r} (data.{option}); {hint}"
                    f"it has: {', '.join(first)}"
                )


def as_list(responses: Any) -> Sequence[Any]:
    """A row may hold one response by itself."""
    return [responses] if not isinstance(responses, list | tuple) else responses
