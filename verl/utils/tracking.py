"""`Tracking` sends the metrics of each step to the back-ends that `trainer.logger` names.

The back-ends of a run are opened once and shared: the table of validation samples goes to the run
that `Tracking` opened. `finish` (or leaving a `with` block) closes them; nothing waits for the
garbage collector.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, ClassVar

import numpy as np

from verl.utils.tracking_backends import Sample, TrackingBackend, tracking_backends
from verl.utils.tracking_backends.mlflow import _MlflowLoggingAdapter

__all__ = ["Tracking", "ValidationGenerationsLogger", "_MlflowLoggingAdapter", "choose_samples"]

_open_backends: dict[tuple[str, str, str], TrackingBackend] = {}


class Tracking:
    """The trackers of one run.

    `default_backend` is a name or a list of names. `config` is what the services show beside the
    run: a mapping, usually the whole configuration as plain containers.
    """

    supported_backend: ClassVar[list[str]] = [*tracking_backends, "tracking"]

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Iterable[str] = "console",
        config: Any = None,
    ) -> None:
        self.project_name = project_name
        self.experiment_name = experiment_name
        self.logger: dict[str, TrackingBackend] = {}
        names = [canonical(name) for name in as_names(default_backend)]
        for name in names:
            tracking_backends[name]  # a misspelt name fails before any service is contacted
        for name in names:
            self.logger[name] = open_backend(name, project_name, experiment_name, config)

    def log(
        self, data: Mapping[str, Any], step: int, backend: str | Iterable[str] | None = None
    ) -> None:
        """Record the metrics of `step`, on every back-end of the run or on those named."""
        names = [*self.logger] if backend is None else [canonical(b) for b in as_names(backend)]
        for name in names:
            if name not in self.logger:
                known = ", ".join(self.logger) or "none"
                raise ValueError(
                    f"this run does not log to {name!r}, only to: {known}; add it to trainer.logger"
                )
            self.logger[name].log(data, step)

    def finish(self) -> None:
        """Close every back-end. Calling it again does nothing."""
        with ExitStack() as stack:  # one that fails to close does not keep the others open
            for name, backend in self.logger.items():
                stack.callback(backend.finish)
                _open_backends.pop((name, self.project_name, self.experiment_name), None)
            self.logger = {}

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.finish()


class ValidationGenerationsLogger:
    """Sends a table of validation samples to the back-ends of a run that `Tracking` opened.

    Without names it is the run that was opened last. The console, the file and trackio show no
    samples; `trainer.validation_data_dir` writes them all to disk.
    """

    def __init__(self, project_name: str = "", experiment_name: str = "") -> None:
        self.project_name = project_name
        self.experiment_name = experiment_name

    def log(self, loggers: str | Iterable[str], samples: Iterable[Sample], step: int) -> None:
        """`samples` are (input, output, score); `loggers` are names, as in `trainer.logger`."""
        rows = list(samples)
        for name in map(canonical, as_names(loggers)):
            self._open_backend(name).log_samples(rows, step)

    def _open_backend(self, name: str) -> TrackingBackend:
        wanted = (self.project_name, self.experiment_name)
        for (kind, *run), backend in reversed(_open_backends.items()):
            if kind == name and (not any(wanted) or tuple(run) == wanted):
                return backend
        raise ValueError(
            f"no open {name!r} tracker for project {wanted[0]!r}, experiment {wanted[1]!r}; "
            "create Tracking with these names before samples are logged"
        )


def choose_samples(
    inputs: Sequence[str], outputs: Sequence[str], scores: Sequence[float], max_samples: int
) -> list[Sample]:
    """The samples of a table: the same prompts at every step, whatever order they come in."""
    samples = sorted(zip(inputs, outputs, scores, strict=True), key=lambda sample: sample[0])
    np.random.RandomState(42).shuffle(samples)
    return list(samples[:max_samples])


def open_backend(
    name: str, project_name: str, experiment_name: str, config: Any
) -> TrackingBackend:
    """The back-end of this run, opened when it is first asked for."""
    run = (name, project_name, experiment_name)
    if run not in _open_backends:
        _open_backends[run] = tracking_backends[name](project_name, experiment_name, config)
    return _open_backends[run]


def as_names(names: str | Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def canonical(name: str) -> str:
    if name == "tracking":
        warnings.warn(
            "logger `tracking` is deprecated; write `wandb`", DeprecationWarning, stacklevel=3
        )
        return "wandb"
    return name
