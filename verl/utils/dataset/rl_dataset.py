"""`RLHFDataset`: the prompts of an RL run, a row at a time.

A row keeps its columns and gains `raw_prompt`, what an agent loop starts from. Answers end up in
`reward_model["ground_truth"]`, wherever the file has them. Rows are checked once, when the dataset
is made: bad ones are left out by name, and so are over-long prompts where the configuration says
so. Token ids are made by the agent loop; here prompts are only measured.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from verl.config.convert import Conversion
from verl.config.data import DataConfig
from verl.config.faults import ConfigError
from verl.utils.dataset.prompts import Prompt, PromptTooLong, as_prompt, encode_prompt, prompt_text
from verl.utils.dataset.row_checks import fault_of, ground_truth_of, settle
from verl.utils.dataset.tables import BadRow, DataError, RowFile, open_files
from verl.utils.import_utils import load_extern_object

logger = logging.getLogger(__name__)

DEFAULT_SEED = 1
UNKNOWN_SOURCE = "unknown"


@runtime_checkable
class LearnsFromBatches(Protocol):
    """A dataset that looks at every trained batch, to generate new rows from it perhaps."""

    def on_batch_end(self, batch: Any) -> None: ...


class RLHFDataset(Dataset[dict[str, Any]]):
    """Prompts from parquet, JSON or JSON Lines files.

    `max_samples` limits the rows: random ones when `config.shuffle` is on, else the first ones.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig | DictConfig | Mapping[str, Any],
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        self.config = as_data_config(config)
        self.tokenizer = tokenizer
        self.processor = processor
        self.files: list[RowFile] = open_files(
            data_files, cache_dir=self.config.cache_dir, use_shm=self.config.use_shm
        )
        places = self._sound_places()
        if 0 <= max_samples < len(places):
            places = self._some_of(places, max_samples)
        self._places = self.maybe_filter_out_long_prompts(places)
        if not self._places:
            raise DataError(f"no prompt of {data_files} is left after filtering")

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = self._row(self._places[item])
        prompt = as_prompt(row.pop(self.config.prompt_key), self.tokenizer)
        extra = dict(row.get("extra_info") or {})
        if self.config.return_full_prompt:
            row["full_prompts"] = self._text(prompt)
        if self.config.return_raw_input_ids:
            row["raw_prompt_ids"] = self._encode(prompt)
        return {
            **row,
            "raw_prompt": prompt,
            "data_source": row.get(self.config.reward_fn_key) or UNKNOWN_SOURCE,
            "reward_model": self._reward_model(row),
            "extra_info": extra,
            "index": extra.get("index", item),
            "tools_kwargs": extra.get("tools_kwargs") or {},
            "interaction_kwargs": extra.get("interaction_kwargs") or {},
            "dummy_tensor": torch.zeros(1, dtype=torch.uint8),
        }

    def maybe_filter_out_long_prompts(self, places: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Leave over-long prompts out, or refuse them, where nothing else will happen to them."""
        config = self.config
        if not config.filter_overlong_prompts and config.truncation != "error":
            return places
        faults = {place: self._length_fault(place) for place in places}
        too_long = [place for place, fault in faults.items() if fault is not None]
        if too_long and not config.filter_overlong_prompts:
            file, row = too_long[0]
            raise DataError(
                f"{len(too_long)} of {len(places)} prompts are too long, the first at "
                f"{self.files[file].bad(row, faults[too_long[0]])}"
            )
        if too_long:
            logger.warning(
                "%d of %d prompts are longer than data.max_prompt_length (%d) and are left out",
                len(too_long), len(places), config.max_prompt_length,
            )  # fmt: skip
        return [place for place, fault in faults.items() if fault is None]

    def resume_dataset_state(self) -> None:
        """Nothing to restore: rows are read from the files, and the loader knows the position."""

    def on_batch_end(self, batch: Any) -> None:
        """Called with every trained batch; this dataset stays as it is."""

    def split(self, num_splits: int) -> list["RLHFDataset"]:
        """Consecutive parts of nearly equal size, each a dataset."""
        parts = []
        for chosen in np.array_split(np.arange(len(self)), num_splits):
            part = object.__new__(type(self))
            part.__dict__.update(self.__dict__)
            part._places = [self._places[i] for i in chosen]
            parts.append(part)
        return parts

    def _sound_places(self) -> list[tuple[int, int]]:
        """(file, row) of every row that passes the checks."""
        sound: list[tuple[int, int]] = []
        bad: list[BadRow] = []
        prompts: set[int] = set()
        for number, file in enumerate(self.files):
            for index, row in enumerate(file):
                fault = None if isinstance(row, BadRow) else fault_of(row, self.config.prompt_key)
                if isinstance(row, BadRow) or fault is not None:
                    bad.append(row if isinstance(row, BadRow) else file.bad(index, fault))
                    continue
                sound.append((number, index))
                prompts.add(hash(repr(row[self.config.prompt_key])))
        settle(bad, len(bad) + len(sound))
        if len(prompts) < len(sound):
            repeated = len(sound) - len(prompts)
            logger.warning("%d of %d prompts repeat an earlier one", repeated, len(sound))
        return sound

    def _some_of(self, places: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
        if not self.config.shuffle:
            return places[:count]
        seed = DEFAULT_SEED if self.config.seed is None else self.config.seed
        return sorted(random.Random(seed).sample(places, count))

    def _row(self, place: tuple[int, int]) -> dict[str, Any]:
        file, index = place
        row = self.files[file].read(index)
        if isinstance(row, BadRow):
            raise DataError(f"{row} (it was readable when the dataset was made)")
        return dict(row)

    def _reward_model(self, row: Mapping[str, Any]) -> dict[str, Any]:
        stated = dict(row.get("reward_model") or {})
        return {"style": "rule", **stated, "ground_truth": ground_truth_of(row)}

    def _length_fault(self, place: tuple[int, int]) -> str | None:
        prompt = as_prompt(self._row(place)[self.config.prompt_key], self.tokenizer)
        limit = self.config.max_prompt_length
        if len(self._text(prompt).encode()) < limit:
            return None  # every token is at least one byte
        try:
            self._encode(prompt, max_tokens=limit)
        except PromptTooLong as fault:
            return str(fault)
        return None

    def _text(self, prompt: Prompt) -> str:
        kwargs = self.config.apply_chat_template_kwargs
        return prompt_text(prompt, self.tokenizer, template_kwargs=kwargs)

    def _encode(self, prompt: Prompt, max_tokens: int | None = None) -> list[int]:
        kwargs = self.config.apply_chat_template_kwargs
        return encode_prompt(prompt, self.tokenizer, max_tokens=max_tokens, template_kwargs=kwargs)


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | np.ndarray]:
    """Columns from rows: tensors are stacked, anything else becomes an array of objects.

    A row without a column that others have holds None there.
    """
    names = dict.fromkeys(name for row in data_list for name in row)
    columns: dict[str, Tensor | np.ndarray] = {}
    for name in names:
        values = [row.get(name) for row in data_list]
        if all(isinstance(value, Tensor) for value in values):
            columns[name] = torch.stack(values)  # pyright: ignore[reportArgumentType]
        else:
            column = np.empty(len(values), dtype=object)
            column[:] = values
            columns[name] = column
    return columns


def get_dataset_class(data_config: DataConfig | DictConfig) -> type[Dataset[Any]]:
    """`data.custom_cls`, or `RLHFDataset`."""
    custom = data_config.custom_cls
    if custom.path is None:
        return RLHFDataset
    chosen = load_extern_object(custom.path, custom.name or "")
    if not isinstance(chosen, type) or not issubclass(chosen, Dataset):
        raise TypeError(
            f"data.custom_cls.name ({custom.name}) in {custom.path} must be a subclass of "
            f"torch.utils.data.Dataset; it is {chosen!r}"
        )
    return chosen


def as_data_config(config: DataConfig | DictConfig | Mapping[str, Any]) -> DataConfig:
    """The typed section; keys that a program left out have their defaults."""
    if isinstance(config, DataConfig):
        return config
    plain = OmegaConf.to_container(config) if isinstance(config, DictConfig) else dict(config)
    assert isinstance(plain, dict)
    conversion = Conversion()
    section = conversion.section(DataConfig, {str(key): value for key, value in plain.items()})
    if conversion.faults:
        raise ConfigError(conversion.faults)
    return section
