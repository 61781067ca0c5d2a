"""Datasets: files of rows, checked and read one row at a time."""

from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

__all__ = ["RLHFDataset", "collate_fn"]
