"""The datasets, samplers and loaders that a configuration asks for."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset, Sampler

from verl.config.data import DataConfig
from verl.config.ppo import PPOConfig
from verl.trainer.ppo.dataloader import PromptLoader
from verl.trainer.ppo.seeds import DEFAULT_SEED
from verl.utils.dataset.dynamicgen_dataset import DynamicGenDataset
from verl.utils.dataset.rl_dataset import (
    AbstractSampler,
    RandomOrder,
    SequentialOrder,
    get_dataset_class,
)
from verl.utils.import_utils import load_extern_object

Collate = Callable[[Sequence[Any]], dict[str, Any]]


def create_rl_dataset(
    data_paths: str | Sequence[str],
    data_config: DataConfig,
    tokenizer: Any,
    processor: Any,
    is_train: bool = True,
    max_samples: int = -1,
) -> Dataset[Any]:
    """`data.custom_cls`, or the built-in dataset; with `data.datagen` it grows in training."""
    cls: Any = get_dataset_class(data_config)
    if is_train and data_config.custom_cls.path is None and data_config.datagen.path is not None:
        cls = DynamicGenDataset
    limit = {"max_samples": max_samples} if max_samples >= 0 else {}
    return cls(
        data_files=data_paths,
        tokenizer=tokenizer,
        processor=processor,
        config=data_config,
        **limit,
    )


def create_rl_sampler(data_config: DataConfig, dataset: Dataset[Any]) -> Sampler[int]:
    """`data.sampler`, or a random order by `data.seed`, or the order of the files."""
    chosen = data_config.sampler
    if chosen.class_path is not None:
        cls = load_extern_object(chosen.class_path, chosen.class_name or "")
        if not isinstance(cls, type) or not issubclass(cls, AbstractSampler):
            raise TypeError(
                f"data.sampler.class_name ({chosen.class_name}) must be an AbstractSampler"
            )
        return cls(data_source=dataset, data_config=data_config)  # pyright: ignore[reportArgumentType]
    if data_config.shuffle:
        return RandomOrder(dataset, run_seed(data_config))  # pyright: ignore[reportArgumentType]
    return SequentialOrder(dataset)  # pyright: ignore[reportArgumentType]


def train_loader(
    config: PPOConfig, dataset: Dataset[Any], sampler: Sampler[int], collate_fn: Collate | None
) -> PromptLoader:
    """Dynamic sampling draws `gen_batch_size` prompts at a time, everything else a whole batch."""
    data, trainer = config.data, config.trainer
    is_dynamic = config.algorithm.filter_groups.enable
    return PromptLoader(
        dataset,
        sampler,
        data.gen_batch_size if is_dynamic else data.train_batch_size,
        collate_fn,
        max_epochs=trainer.total_epochs if trainer.total_training_steps is None else None,
    )


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
