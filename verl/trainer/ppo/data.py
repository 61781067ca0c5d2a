"""The training data of a run: datasets, samplers, and `PromptLoader`, which knows where it stands.

The position is (epoch, rows taken in it), and it moves when a batch is handed out. A checkpoint
taken after a step therefore names the first row that no step has seen, at the end of an epoch too.
An epoch has the rows that the data had when it began: what a growing dataset adds comes in the
next.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from omegaconf import DictConfig
from torch.utils.data import Dataset, Sampler

from verl.agent_loop.buffer import BufferPolicy, DynamicSampling, OnPolicy, PreferredGroups
from verl.config.convert import omega_conf_to_dataclass
from verl.config.data import DataConfig
from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.trainer.common import DEFAULT_SEED
from verl.utils.dataset.dynamicgen_dataset import DynamicGenDataset
from verl.utils.dataset.rl_dataset import (
    AbstractCurriculumSampler,
    AbstractSampler,
    EpochSampler,
    GradingFault,
    LearnsFromBatches,
    RandomOrder,
    RLHFDataset,
    SequentialOrder,
    Stateful,
    get_dataset_class,
)
from verl.utils.dataset.rl_dataset import collate_fn as default_collate_fn
from verl.utils.dataset.tables import DataError
from verl.utils.environment import Misuse
from verl.utils.import_utils import load_extern_object

logger = logging.getLogger(__name__)

MADE_ANEW = ("dummy_tensor", "input_ids", "attention_mask", "position_ids")
Rows = dict[str, Any]


class EndOfData(Exception):
    """All epochs are over."""


class PromptLoader:
    """Draws rows of `dataset` in the order of `sampler`, `batch_size` at a time.

    With `drop_last` an epoch ends when fewer rows are left than a batch has. Iterating gives the
    batches of the current epoch; `next_batch` goes on into the next one, up to `max_epochs`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: Sampler[int],
        batch_size: int,
        collate_fn: Callable[[Sequence[Any]], Rows] | None = None,
        *,
        drop_last: bool = True,
        max_epochs: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.batch_size = batch_size
        self.collate_fn = collate_fn or default_collate_fn
        self.drop_last = drop_last
        self.max_epochs = max_epochs
        self.epoch = 0
        self.position = 0
        self.epoch_rows = self.num_rows
        self._order: Iterator[int] | None = None
        if not len(self):
            raise DataError(
                f"the data has {self.num_rows} rows and a batch needs {batch_size}; lower "
                "data.train_batch_size or add rows"
            )

    @property
    def num_rows(self) -> int:
        """Rows of an epoch that begins now."""
        return len(self.sampler)  # pyright: ignore[reportArgumentType]

    def __len__(self) -> int:
        """Batches per epoch."""
        full, rest = divmod(self.num_rows, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Rows]:
        if not self._has_batch():
            self._next_epoch()
        while self._has_batch():
            yield self.collate_fn([self.dataset[row] for row in self._next_rows()])
        self._next_epoch()

    def next_batch(self) -> Rows:
        if not self._has_batch():
            self._next_epoch()
        if self.max_epochs is not None and self.epoch >= self.max_epochs:
            raise EndOfData(f"all {self.max_epochs} epochs of the data are used")
        return self.collate_fn([self.dataset[row] for row in self._next_rows()])

    def learn_from(self, batch: DataProto) -> None:
        """Tell a curriculum and a dataset that grows what was trained on."""
        if isinstance(self.sampler, AbstractCurriculumSampler):
            self.sampler.update(batch=batch)
        if isinstance(self.dataset, LearnsFromBatches):
            self.dataset.on_batch_end(batch=batch)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_rows": self.num_rows,
            "epoch_rows": self.epoch_rows,
            "sampler": self.sampler.state_dict() if isinstance(self.sampler, Stateful) else None,
            "dataset": self.dataset.state_dict() if isinstance(self.dataset, Stateful) else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self.dataset, Stateful):
            self.dataset.load_state_dict(state["dataset"])
        if state["num_rows"] != self.num_rows:
            raise DataError(
                f"the data had {state['num_rows']} rows when the run was saved and has "
                f"{self.num_rows} now; continue with the same files and filters"
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self.epoch_rows = int(state.get("epoch_rows", self.num_rows))
        self._order = None
        if isinstance(self.sampler, Stateful):
            self.sampler.load_state_dict(state["sampler"])
            self._order = iter(self.sampler)
        elif isinstance(self.sampler, AbstractCurriculumSampler):
            logger.warning(
                "%s has no state_dict and load_state_dict: what it has learned is lost, and rows "
                "may come twice or not at all in this epoch", type(self.sampler).__name__,
            )  # fmt: skip

    def _has_batch(self) -> bool:
        left = self.epoch_rows - self.position
        return left >= self.batch_size if self.drop_last else left > 0

    def _next_rows(self) -> list[int]:
        if self._order is None:
            self._order = self._wound_forward()
        wanted = min(self.batch_size, self.epoch_rows - self.position)
        chosen = list(islice(self._order, wanted))
        if len(chosen) < wanted:
            raise ValueError(
                f"{type(self.sampler).__name__} gave {self.position + len(chosen)} rows in epoch "
                f"{self.epoch}, but its length is {self.epoch_rows}; both must agree"
            )
        self.position += len(chosen)
        logger.debug("batch of rows %s of epoch %d", chosen, self.epoch)
        return chosen

    def _wound_forward(self) -> Iterator[int]:
        """The order of this epoch from the current position on."""
        if isinstance(self.sampler, EpochSampler):
            self.sampler.set_epoch(self.epoch, self.epoch_rows)
        return islice(iter(self.sampler), self.position, None)

    def _next_epoch(self) -> None:
        # A sampler may do something when its epoch is over: it learns so by being asked once more.
        if self._order is not None and not isinstance(self.sampler, EpochSampler):
            deque(islice(self._order, self.epoch_rows - self.position + 1), maxlen=0)
        self.epoch += 1
        self.position = 0
        self.epoch_rows = self.num_rows
        self._order = None


Collate = Callable[[Sequence[Any]], dict[str, Any]]


def create_rl_dataset(
    data_paths: str | Sequence[str],
    data_config: DataConfig,
    tokenizer: Any,
    processor: Any,
    is_train: bool = True,
    max_samples: int = -1,
    *,
    grading_fault: GradingFault | None = None,
) -> Dataset[Any]:
    """`data.custom_cls`, or the built-in dataset; with `data.datagen` it grows in training.

    The built-in ones leave out rows that cannot be graded.
    """
    cls: Any = get_dataset_class(data_config)
    if is_train and data_config.custom_cls.path is None and data_config.datagen.path is not None:
        cls = DynamicGenDataset
    limit: dict[str, Any] = {"max_samples": max_samples} if max_samples >= 0 else {}
    if cls in (RLHFDataset, DynamicGenDataset):
        limit["grading_fault"] = grading_fault
    return cls(
        data_files=data_paths,
        tokenizer=tokenizer,
        processor=processor,
        config=data_config,
        **limit,
    )


class NotASampler(Misuse, TypeError, AssertionError):
    """A class of the wrong kind in `data.sampler`; callers have always caught an AssertionError."""


def create_rl_sampler(data_config: DataConfig | DictConfig, dataset: Dataset[Any]) -> Sampler[int]:
    """`data.sampler`, or a random order by `data.seed`, or the order of the files.

    Keys that a `DictConfig` lacks have their defaults.
    """
    if not isinstance(data_config, DataConfig):
        data_config = omega_conf_to_dataclass(data_config, DataConfig)
    chosen = data_config.sampler
    if chosen.class_path is not None:
        cls = load_extern_object(chosen.class_path, chosen.class_name or "")
        if not isinstance(cls, type) or not issubclass(cls, AbstractSampler):
            raise NotASampler(
                f"data.sampler.class_name ({chosen.class_name}) in {chosen.class_path} must be a "
                f"subclass of verl.experimental.dataset.sampler.AbstractSampler; it is {cls!r}"
            )
        return cls(data_source=dataset, data_config=data_config)  # pyright: ignore[reportArgumentType]
    if data_config.shuffle:
        return RandomOrder(dataset, run_seed(data_config))  # pyright: ignore[reportArgumentType]
    return SequentialOrder(dataset)  # pyright: ignore[reportArgumentType]


def train_loader(
    config: PPOConfig, dataset: Dataset[Any], sampler: Sampler[int], collate_fn: Collate | None
) -> PromptLoader:
    trainer = config.trainer
    return PromptLoader(
        dataset,
        sampler,
        prompts_per_draw(config),
        collate_fn,
        max_epochs=trainer.total_epochs if trainer.total_training_steps is None else None,
    )


def prompts_per_draw(config: PPOConfig) -> int:
    """Dynamic sampling draws `gen_batch_size` prompts at a time, a filter that prefers some more
    than a batch, everything else a batch."""
    data = config.data
    if config.algorithm.filter_groups.enable:
        return data.gen_batch_size
    is_filtered = data.filter_accuracy or data.filter_truncate
    return math.ceil(data.train_batch_size * (data.oversample_factor if is_filtered else 1))


def buffer_policy(config: PPOConfig) -> BufferPolicy:
    """Which groups a step trains on."""
    data, chosen = config.data, config.algorithm.filter_groups
    if data.filter_accuracy or data.filter_truncate:
        bounds = (data.accuracy_lower_bound, data.accuracy_upper_bound)
        return PreferredGroups(
            data.train_batch_size,
            prompts_per_draw(config),
            accuracy_bounds=bounds if data.filter_accuracy else None,
            max_response_tokens=data.max_response_length if data.filter_truncate else None,
        )
    if not chosen.enable:
        return OnPolicy(data.train_batch_size)
    assert chosen.metric is not None  # refused by validation
    return DynamicSampling(
        data.train_batch_size,
        data.gen_batch_size,
        chosen.metric,
        chosen.max_num_gen_batches,
    )


def as_prompts(rows: dict[str, Any]) -> DataProto:
    """A batch of rows, without the tensors that datasets still make and the rollout makes anew."""
    return DataProto.from_single_dict({k: v for k, v in rows.items() if k not in MADE_ANEW})


def validation_loader(
    config: PPOConfig, dataset: Dataset[Any], collate_fn: Collate | None
) -> PromptLoader:
    data = config.data
    num_rows = len(dataset)  # pyright: ignore[reportArgumentType]
    order = SequentialOrder(dataset)  # pyright: ignore[reportArgumentType]
    if data.validation_shuffle:
        order = RandomOrder(dataset, run_seed(data))  # pyright: ignore[reportArgumentType]
    return PromptLoader(
        dataset, order, data.val_batch_size or num_rows, collate_fn, drop_last=False
    )


def run_seed(data_config: DataConfig) -> int:
    """The number that all random choices of a run follow from."""
    return DEFAULT_SEED if data_config.seed is None else data_config.seed
