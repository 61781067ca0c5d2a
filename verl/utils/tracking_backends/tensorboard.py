"""TensorBoard event files, in `$TENSORBOARD_DIR` or `tensorboard_log/<project>/<experiment>`."""

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from verl.utils.environment import tensorboard_dir
from verl.utils.printable import printable
from verl.utils.tracking_backends.base import (
    Sample,
    TrackingBackend,
    numbers_only,
    optional_package,
)


class TensorboardBackend(TrackingBackend):
    """Numbers become scalars; what is no number is left to the other back-ends."""

    def __init__(self, project_name: str, experiment_name: str, config: Any = None) -> None:
        super().__init__(project_name, experiment_name, config)
        optional_package("tensorboard", backend="tensorboard", extra="track")
        module = optional_package("torch.utils.tensorboard", backend="tensorboard")
        self.folder = tensorboard_dir() or f"tensorboard_log/{project_name}/{experiment_name}"
        self._writer = module.SummaryWriter(self.folder)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        for name, value in numbers_only(data).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, samples: Iterable[Sample], step: int) -> None:
        self._writer.add_text("val/generations", markdown_table(samples), step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


def markdown_table(samples: Iterable[Sample]) -> str:
    """TensorBoard renders Markdown, so neither HTML nor a `|` may come from a sample."""
    lines = ["| input | output | score |", "|---|---|---|"]
    for sample in samples:
        cells = (escape(printable(cell)).replace("|", "&#124;") for cell in sample)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
