"""A dataset that grows while training goes on: a generator makes new rows after every step.

Rows of files and generated rows are one table, so generated ones are checked, named and measured
like any others. They are part of the run's state: a run that is resumed has them without generating
them again. A row that is added during an epoch is drawn from the next epoch on.
"""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from verl.config.data import DataConfig
from verl.utils.dataset.rl_dataset import RLHFDataset, Stateful
from verl.utils.dataset.tables import DataError, Row, RowFile, RowTable
from verl.utils.import_utils import load_extern_object
from verl.utils.py_functional import printable

logger = logging.getLogger(__name__)


class AbstractDataGenerator(ABC):
    """Makes rows. One that has `state_dict` and `load_state_dict` continues where it was."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def generate(self, dataset: "RLHFDataset") -> Iterable[Mapping[str, Any]]:
        """New rows, with the columns that rows of a file have; a Hugging Face dataset is fine."""


class MockDataGenerator(AbstractDataGenerator):
    """Adds the first row of the data again: for tests."""

    def generate(self, dataset: RLHFDataset) -> Iterable[Mapping[str, Any]]:
        return [dataset.dataframe[0]]


class GeneratedRows(RowFile):
    """Rows in memory that can be added to; to everything else they are a file."""

    def __init__(self, rows: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__("<generated>")
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return GeneratedRows, (self.rows,)

    def read(self, row: int) -> Row:
        return dict(self.rows[row])


class DynamicGenDataset(RLHFDataset):
    """`RLHFDataset` and a generator, the class that `data.datagen` names.

    `on_batch_end` generates after every step; the first rows are generated when it is made.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig | DictConfig | Mapping[str, Any],
        processor: Any = None,
        max_samples: int = -1,
        **options: Any,
    ) -> None:
        super().__init__(data_files, tokenizer, config, processor, max_samples, **options)
        if not isinstance(self.dataframe, RowTable):
            raise TypeError(f"a {type(self.dataframe).__name__} cannot grow; read a RowTable")
        self._from_files = self.dataframe
        self.generated: list[dict[str, Any]] = []
        self.data_generator = self._make_generator()
        self.on_batch_end(batch=None)

    @property
    def files(self) -> list[RowFile]:
        return self._from_files.files

    def on_batch_end(self, batch: Any) -> None:
        """Let the generator look at the data, and add the rows it makes."""
        self.append_rows(self.data_generator.generate(self))

    def append_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the rows that pass the checks of this dataset; the others are named and left out."""
        for row in rows:
            try:
                plain = json.loads(json.dumps(dict(row)))  # as it will be after a restart
            except (TypeError, ValueError) as error:
                raise DataError(f"a generated row cannot be saved as JSON: {error}") from error
            fault = self._fault(plain) or self._length_fault(plain)
            if fault is None:
                self.generated.append(plain)
            else:
                logger.warning("a generated row is left out: %s", printable(fault))
        self._join()

    def _join(self) -> None:
        """One table of the rows from files and the generated ones."""
        table, new = self._from_files, GeneratedRows(self.generated)
        first = sum(len(file) for file in table.files)
        numbers = np.concatenate([table.numbers, np.arange(first, first + len(new))])
        self.dataframe = RowTable([*table.files, new], numbers)

    def state_dict(self) -> dict[str, Any]:
        lines = "".join(json.dumps(row) + "\n" for row in self.generated).encode()
        own = self.data_generator
        return {
            "generated": np.frombuffer(lines, dtype=np.uint8).copy(),
            "generator": own.state_dict() if isinstance(own, Stateful) else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have the generated rows of the saved run in the place of those made since the start."""
        lines = np.asarray(state_dict["generated"], dtype=np.uint8).tobytes().splitlines()
        self.generated = [json.loads(line) for line in lines]
        self._join()
        if isinstance(self.data_generator, Stateful):
            self.data_generator.load_state_dict(state_dict["generator"])

    def _make_generator(self) -> AbstractDataGenerator:
        chosen = self.config.datagen
        if chosen.path is None:
            raise ValueError("data.datagen.path is null; it must name the file of a generator")
        cls = load_extern_object(chosen.path, chosen.name or "")
        if not isinstance(cls, type) or not issubclass(cls, AbstractDataGenerator):
            raise TypeError(
                f"data.datagen.name ({chosen.name}) in {chosen.path} must be an "
                f"AbstractDataGenerator; it is {cls!r}"
            )
        return cls(self.config.datagen)
