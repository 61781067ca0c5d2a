"""Older import path of `verl.utils.dataset.dynamicgen_dataset`."""

from verl.utils.dataset.dynamicgen_dataset import (
    AbstractDataGenerator,
    DynamicGenDataset,
    MockDataGenerator,
)

__all__ = ["AbstractDataGenerator", "DynamicGenDataset", "MockDataGenerator"]
