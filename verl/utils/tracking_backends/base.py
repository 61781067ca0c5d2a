"""What every tracking back-end does, and how the optional packages are asked for."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.utils.import_utils import require

Sample = Sequence[Any]
"""One validation sample as (input, output, score), as the sample tables show it."""


class TrackingBackend(ABC):
    """One run of one experiment on one service. Nothing is logged after `finish`."""

    def __init__(self, project_name: str, experiment_name: str, config: Any = None) -> None:
        self.project_name = project_name
        self.experiment_name = experiment_name
        self.config = config

    @abstractmethod
    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Record the metrics of one step. What is no number and cannot be shown is left out."""

    # Optional: the console, a metrics file and trackio have no table of samples.
    def log_samples(self, samples: Iterable[Sample], step: int) -> None:  # noqa: B027
        """Record a table of validation samples."""

    def finish(self) -> None:  # noqa: B027
        """End the run: what was logged is written out and connections are closed."""


def optional_package(module: str, *, backend: str, extra: str | None = None) -> Any:
    """Import what a back-end needs; the error names the package and how to get it."""
    try:
        return require(module, extra)
    except ImportError as error:
        raise ImportError(f"trainer.logger names {backend!r}: {error}") from error


def plain(value: Any) -> Any:
    """Tensors and arrays as Python numbers and lists; everything else unchanged."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value.tolist()
    return value


def numbers_only(data: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are single numbers, for services that hold nothing else."""
    values = {name: plain(value) for name, value in data.items()}
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
