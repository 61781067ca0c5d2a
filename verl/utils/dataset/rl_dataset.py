"""`RLHFDataset`: the prompts of an RL run, a row at a time, and the order in which they are drawn.

A row keeps its columns and gains `raw_prompt`, what an agent loop starts from. Answers end up in
`reward_model["ground_truth"]`, wherever the file has them. Rows are checked once, when the dataset
is made: bad ones are left out by name, and so are over-long prompts where the configuration says
so. Token ids are made by the agent loop; here prompts are only measured.

An order is a function of a seed, the epoch and the number of rows, so that it can be computed again
from these three numbers: a run that stops continues with the very rows it would have seen. Samplers
of users (`data.sampler`) may change their order as training goes on; with `state_dict` and
`load_state_dict` they continue exactly, too.
"""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from verl.config.convert import Conversion, plain
from verl.config.data import DataConfig
from verl.config.faults import ConfigError
from verl.tools.tool_registry import schemas_of_files
from verl.utils.dataset.media import load_media, media_fault, with_media
from verl.utils.dataset.prompt_encoder import PromptEncoder, PromptRow
from verl.utils.dataset.prompts import (
    NoChatTemplate,
    Prompt,
    PromptTooLong,
    as_prompt,
    has_media,
    set_chat_template,
)
from verl.utils.dataset.quarantine import (
    CHECKED_COLUMNS,
    Verdict,
    fault_of,
    ground_truth_of,
    measured,
    settle_refused,
    sound_rows,
)
from verl.utils.dataset.tables import DataError, RowFile, RowTable, open_table
from verl.utils.environment import Misuse
from verl.utils.import_utils import load_extern_object

logger = logging.getLogger(__name__)

DEFAULT_SEED = 1
UNKNOWN_SOURCE = "unknown"
GradingFault = Callable[[Any, Any], str | None]
LOOPS_THAT_GRADE = ("env_agent", "program_agent")
"""Agent loops whose rows need no answer: what they talk to gives the reward."""


def tool_schemas_of(config: DataConfig) -> list[dict[str, Any]]:
    """What the chat template is told of tools, where the files of the run say it."""
    try:
        return schemas_of_files(config.tool_config_path, config.function_tool_path)
    except (ValueError, OSError, ImportError, AttributeError, RuntimeError) as error:
        raise DataError(f"the tools, which count in the length of prompts: {error}") from error


@runtime_checkable
class LearnsFromBatches(Protocol):
    """A dataset that looks at every trained batch, to generate new rows from it perhaps."""

    def on_batch_end(self, batch: Any) -> None: ...


class Rows(Protocol):
    """What holds the rows: our `RowTable`, or a Hugging Face dataset that a subclass has made."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: Any, /) -> Any: ...

    def select(self, indices: Any, /) -> Any: ...


class RLHFDataset(Dataset[dict[str, Any]]):
    """Prompts from parquet, JSON or JSON Lines files.

    `max_samples` limits the rows: random ones when `config.shuffle` is on, else the first ones.
    `grading_fault` says of a data source and an answer why a row with them cannot be graded; such
    rows, and those with more than `max_images` images, are left out as other bad rows are. Pickled,
    it takes no rows along: the copy opens the files again.
    """

    dataframe: Rows

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig | DictConfig | Mapping[str, Any],
        processor: Any = None,
        max_samples: int = -1,
        *,
        grading_fault: GradingFault | None = None,
        max_images: int | None = None,
    ) -> None:
        self.config = as_data_config(config)
        self._grading_fault = grading_fault
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.tokenizer = tokenizer
        set_chat_template(tokenizer, self.config.chat_template)
        self.processor = processor
        self.max_samples = max_samples
        self._keys = (self.config.prompt_key, self.config.image_key, self.config.video_key)
        self.tool_schemas = tool_schemas_of(self.config)
        self.encoder = PromptEncoder(
            tokenizer, processor, self.config, self.tool_schemas, max_images=max_images
        )
        self._read_files_and_tokenize()
        if not len(self.dataframe):
            raise DataError(f"no prompt of {data_files} is left after filtering")

    def _read_files_and_tokenize(self) -> None:
        """Set `dataframe`. A subclass may read other formats into a Hugging Face dataset here."""
        config = self.config
        table = open_table(self.data_files, cache_dir=config.cache_dir, use_shm=config.use_shm)
        table = self._sound(table)
        if 0 <= self.max_samples < len(table):
            table = table.select(self._some_of(len(table), self.max_samples))
        self.dataframe = self.maybe_filter_out_long_prompts(table)

    @property
    def files(self) -> list[RowFile]:
        """The files behind the rows, where there are any."""
        return self.dataframe.files if isinstance(self.dataframe, RowTable) else []

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(self.dataframe[item])
        prompt = self._build_messages(row)
        extra = dict(row.get("extra_info") or {})
        columns = {
            **row,
            "raw_prompt": prompt,
            "data_source": row.get(self.config.reward_fn_key) or UNKNOWN_SOURCE,
            "reward_model": self._reward_model(row),
            "extra_info": extra,
            "index": extra.get("index", item),
            "tools_kwargs": self._tools_kwargs(extra, item),
            "interaction_kwargs": extra.get("interaction_kwargs") or {},
            "dummy_tensor": torch.zeros(1, dtype=torch.uint8),
        }
        offered = self.encoder.offered(prompt)
        if self.config.return_full_prompt:
            columns["full_prompts"] = offered["full_prompts"]()
        if self.config.return_raw_input_ids:
            columns["raw_prompt_ids"] = offered["raw_prompt_ids"]()
        return PromptRow(columns, offered)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[item] for item in range(len(self)))

    # ---- choosing rows ---------------------------------------------------------------------------

    def _sound(self, table: RowTable) -> RowTable:
        config = self.config
        return sound_rows(
            table,
            self._fault,
            columns={*self._keys, config.reward_fn_key, *CHECKED_COLUMNS},
            prompt_key=config.prompt_key,
            cache_dir=config.cache_dir,
        )

    def _fault(self, row: Mapping[str, Any]) -> str | None:
        prompt_key, image_key, video_key = self._keys
        fault = fault_of(row, prompt_key)
        grades_itself = row.get("agent_name") in LOOPS_THAT_GRADE
        if fault is None and self._grading_fault is not None and not grades_itself:
            fault = self._grading_fault(row.get(self.config.reward_fn_key), ground_truth_of(row))
        images, videos = row.get(image_key) or (), row.get(video_key) or ()
        if fault is not None or not (images or videos):
            return fault
        if self.processor is None:
            return (
                f"has {image_key if images else video_key}, and the model has no processor for "
                "them; choose a model that sees, or leave the column out"
            )
        return media_fault(row[prompt_key], images, videos)

    def _some_of(self, num_rows: int, count: int) -> np.ndarray:
        if not self.config.shuffle:
            return np.arange(count)
        seed = DEFAULT_SEED if self.config.seed is None else self.config.seed
        return np.sort(np.random.default_rng(seed).choice(num_rows, count, replace=False))

    def maybe_filter_out_long_prompts(self, dataframe: Rows) -> Any:
        """Leave over-long prompts out, or refuse them, where nothing else will happen to them."""
        config = self.config
        is_cut = not config.filter_overlong_prompts and config.truncation != "error"
        if is_cut and self.processor is None:  # prompts with images are never cut
            return dataframe
        found = measured(
            partial(self._verdict, dataframe),
            len(dataframe),
            num_workers=config.filter_overlong_prompts_workers,
        )
        too_long = np.flatnonzero(found == Verdict.TOO_LONG)
        if len(too_long) and not config.filter_overlong_prompts:
            first = int(too_long[0])
            raise DataError(
                f"{len(too_long)} of {len(dataframe)} prompts are too long, the first at "
                f"{place_of(dataframe, first)}: {self._length_fault(dataframe[first])}"
            )
        if len(too_long):
            logger.warning(
                "%d of %d prompts are longer than data.max_prompt_length (%d) and are left out",
                len(too_long), len(dataframe), config.max_prompt_length,
            )  # fmt: skip
        self._settle_refused(dataframe, np.flatnonzero(found == Verdict.REFUSED))
        return dataframe.select(np.flatnonzero(found == Verdict.FITS))

    def _settle_refused(self, dataframe: Rows, refused: np.ndarray) -> None:
        """Rows that the chat template does not take are bad rows like others."""
        if not len(refused):
            return
        if not isinstance(dataframe, RowTable):
            raise DataError(f"row {refused[0]}: {self._length_fault(dataframe[int(refused[0])])}")
        settle_refused(
            dataframe,
            refused,
            lambda item: self._length_fault(dataframe[item]),
            cache_dir=self.config.cache_dir,
        )

    def _verdict(self, dataframe: Rows, item: int) -> Verdict:
        try:
            fault = self._length_fault(dataframe[item])
        except NoChatTemplate as error:
            raise NoChatTemplate(f"{place_of(dataframe, item)}: {error}") from error
        if fault is None:
            return Verdict.FITS
        return Verdict.TOO_LONG if isinstance(fault, PromptTooLong) else Verdict.REFUSED

    def _length_fault(self, row: Mapping[str, Any]) -> Exception | None:
        prompt = self._build_messages(dict(row))
        config = self.config
        if not config.filter_overlong_prompts and config.truncation != "error":
            return self.encoder.fault(prompt) if has_media(prompt) else None
        return self.encoder.fault(prompt)

    # ---- what a row gives ------------------------------------------------------------------------

    def _build_messages(self, example: dict[str, Any]) -> Prompt:
        """The prompt of a row, with its images and videos in place; their columns are taken out."""
        prompt_key, image_key, video_key = self._keys
        prompt = as_prompt(example.pop(prompt_key), self.tokenizer)
        images = example.pop(image_key, None) or ()
        videos = example.pop(video_key, None) or ()
        if not images and not videos:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return with_media(messages, images, videos)

    def _reward_model(self, row: Mapping[str, Any]) -> dict[str, Any]:
        stated = dict(row.get("reward_model") or {})
        return {"style": "rule", **stated, "ground_truth": ground_truth_of(row)}

    def _tools_kwargs(self, extra: Mapping[str, Any], item: int) -> dict[str, Any]:
        found = extra.get("tools_kwargs") or {}
        if not found and (self.config.need_tools_kwargs or extra.get("need_tools_kwargs")):
            logger.warning("%s needs tools_kwargs and has none", place_of(self.dataframe, item))
        return found

    @classmethod
    async def process_vision_info(
        cls, messages: Sequence[Mapping[str, Any]], image_patch_size: int, config: Any
    ) -> tuple[list[Any], list[Any]]:
        """The images and videos of messages, loaded; resizing them is the processor's part.

        Agent loops call it; a subclass may override it to prepare media for its model.
        """
        return await asyncio.to_thread(load_media, messages)

    # ---- over time -------------------------------------------------------------------------------

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
            part.dataframe = self.dataframe.select(chosen)
            parts.append(part)
        return parts


def place_of(dataframe: Rows, item: int) -> str:
    """Where a row comes from, for messages."""
    return dataframe.location(item) if isinstance(dataframe, RowTable) else f"row {item}"


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


class NotADataset(Misuse, TypeError):
    """An object of the wrong kind in `data.custom_cls`."""


def get_dataset_class(data_config: DataConfig | DictConfig) -> type[Dataset[Any]]:
    """`data.custom_cls`, or `RLHFDataset`."""
    custom = data_config.custom_cls
    if custom.path is None:
        return RLHFDataset
    chosen = load_extern_object(custom.path, custom.name or "")
    if not isinstance(chosen, type) or not issubclass(chosen, Dataset):
        raise NotADataset(
            f"data.custom_cls.name ({custom.name}) in {custom.path} must be a subclass of "
            f"torch.utils.data.Dataset; it is {chosen!r}"
        )
    return chosen


def as_data_config(config: DataConfig | DictConfig | Mapping[str, Any]) -> DataConfig:
    """The typed section; keys that a program left out have their defaults."""
    if isinstance(config, DataConfig):
        return config
    values = {str(key): value for key, value in plain(config).items()}
    conversion = Conversion()
    section = conversion.section(DataConfig, values)
    if conversion.faults:
        raise ConfigError(conversion.faults)
    return section


@runtime_checkable
class Stateful(Protocol):
    """Something that is saved with a run and continues by itself where it was.

    A state is plain data: numbers, texts, lists, dictionaries, NumPy arrays and tensors.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class AbstractSampler(Sampler[int]):
    """A user's sampler: iterating gives the row numbers of one epoch, as many as its length."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any) -> None: ...


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that learns from each trained batch what to draw next."""

    @abstractmethod
    def update(self, batch: Any) -> None: ...


class EpochSampler(Sampler[int]):
    """A sampler whose order depends on the epoch and its number of rows alone."""

    def __init__(self, data_source: Sized) -> None:
        self.data_source = data_source
        self.epoch = 0
        self._num_rows: int | None = None

    def set_epoch(self, epoch: int, num_rows: int | None = None) -> None:
        """Give the order of this epoch next; `num_rows` is the size the data had at its start."""
        self.epoch = epoch
        self._num_rows = num_rows

    @property
    def num_rows(self) -> int:
        return len(self.data_source) if self._num_rows is None else self._num_rows

    def __len__(self) -> int:
        """Rows of an epoch that begins now."""
        return len(self.data_source)


class SequentialOrder(EpochSampler):
    """Every epoch from the first row to the last."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_rows))


class RandomOrder(EpochSampler):
    """Every epoch in an order of its own, each row once."""

    def __init__(self, data_source: Sized, seed: int) -> None:
        super().__init__(data_source)
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.num_rows)
        return map(int, order)
