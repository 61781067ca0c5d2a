"""`Tracking` sends the metrics of each step to the back-ends that `trainer.logger` names.

The back-ends of a run are opened once and shared: the table of validation samples goes to the run
that `Tracking` opened. `finish` (or leaving a `with` block) closes them. To add a back-end,
subclass `TrackingBackend` and register it in `tracking_backends`; services of other packages live
in `verl.utils.tracking_backends` and are imported when a run names them.

`file` writes one JSON object per line: `{"step": 3, "data": {"actor/entropy": 0.7}}`. Each line is
one unbuffered append, so a reader never sees half a line of a living run, several processes may
share the file, and a killed run keeps every step it logged. JSON has no NaN or infinity; they are
written as strings that `float()` reads back.

`console` prints one line per step: on a terminal the metrics that are looked at first
(`HEADLINES`), elsewhere every metric, for `grep`. Names and values may come from a dataset or a
model; they are escaped, never interpreted.
"""

import json
import logging
import math
import os
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from rich.console import Console
from rich.text import Text

from verl.utils.environment import file_logger_path, file_logger_root
from verl.utils.import_utils import require
from verl.utils.py_functional import printable
from verl.utils.registry import Registry

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


tracking_backends = Registry[type[TrackingBackend]](
    "tracking backend",
    console="verl.utils.tracking:ConsoleBackend",
    file="verl.utils.tracking:FileBackend",
    tensorboard="verl.utils.tracking_backends:TensorboardBackend",
    mlflow="verl.utils.tracking_backends:MlflowBackend",
    wandb="verl.utils.tracking_backends:WandbBackend",
    vemlp_wandb="verl.utils.tracking_backends:VemlpWandbBackend",
    swanlab="verl.utils.tracking_backends:SwanlabBackend",
    clearml="verl.utils.tracking_backends:ClearmlBackend",
    trackio="verl.utils.tracking_backends:TrackioBackend",
)


_open_backends: dict[tuple[str, str, str], TrackingBackend] = {}
_listeners: dict[tuple[str, str], TrackingBackend] = {}


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
        listener = _listeners.get((self.project_name, self.experiment_name))
        if listener is not None:
            listener.log(data, step)

    def finish(self) -> None:
        """Close every back-end. Calling it again does nothing."""
        with ExitStack() as stack:  # one that fails to close does not keep the others open
            for name, backend in self.logger.items():
                stack.callback(backend.finish)
                _open_backends.pop((name, self.project_name, self.experiment_name), None)
            self.logger = {}

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()


@contextmanager
def listening(listener: TrackingBackend) -> Iterator[None]:
    """Give `listener` whatever a `Tracking` of its run logs, whoever has made that."""
    run = (listener.project_name, listener.experiment_name)
    _listeners[run] = listener
    try:
        yield
    finally:
        del _listeners[run]


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


class FileBackend(TrackingBackend):
    def __init__(self, project_name: str, experiment_name: str, config: Any = None) -> None:
        super().__init__(project_name, experiment_name, config)
        self.path = metrics_path(project_name, experiment_name)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = os.open(
            self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644
        )
        self._end_torn_line()

    def log(self, data: Mapping[str, Any], step: int) -> None:
        line = json.dumps({"step": step, "data": jsonable(data)}, allow_nan=False)
        self._append(line.encode() + b"\n")

    def finish(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, line: bytes) -> None:
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed: log before `finish`")
        written = os.write(self._descriptor, line)
        if written != len(line):  # a full disk; the torn line is ended when the file is next opened
            raise OSError(f"wrote {written} of {len(line)} bytes to {self.path}: is the disk full?")

    def _end_torn_line(self) -> None:
        """A machine that lost power may have left half a line; the next one starts on its own."""
        assert self._descriptor is not None
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            self._append(b"\n")


def metrics_path(project_name: str, experiment_name: str) -> Path:
    """`$VERL_FILE_LOGGER_PATH`, else `$VERL_FILE_LOGGER_ROOT/<project>/<experiment>.jsonl`."""
    explicit = file_logger_path()
    if explicit is not None:
        return Path(explicit).expanduser()
    return Path(file_logger_root()).expanduser() / project_name / f"{experiment_name}.jsonl"


def jsonable(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [jsonable(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return repr(value)


HEADLINES = {
    "critic/score/mean": "score",
    "train/loss": "loss",
    "val/loss": "validation loss",
    "val/accuracy": "validation accuracy",
    "response_length/mean": "length",
    "actor/entropy": "entropy",
    "actor/kl_loss": "kl",
    "actor/grad_norm": "grad_norm",
    "train/grad_norm": "grad_norm",
    "timing_s/step": "seconds",
    "perf/throughput": "tokens/s",
}
"""Metrics on a terminal, in this order, and their labels there."""

ALWAYS_SHOWN = ("val-core/", "tripwire/")


class ConsoleBackend(TrackingBackend):
    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        config: Any = None,
        *,
        console: Console | None = None,
    ) -> None:
        super().__init__(project_name, experiment_name, config)
        self._console = console if console is not None else Console()

    def log(self, data: Mapping[str, Any], step: int) -> None:
        line = headline if self._console.is_terminal else step_line
        self._console.print(Text(line(data, step)), soft_wrap=True)


def headline(data: Mapping[str, Any], step: int) -> str:
    """The metrics of `HEADLINES`, validation, tripwires, and every value that is not finite."""
    shown = {name: label for name, label in HEADLINES.items() if name in data}
    for name, value in data.items():
        is_finite = not isinstance(value, float) or math.isfinite(value)
        if name.startswith(ALWAYS_SHOWN) or not is_finite:
            shown.setdefault(name, name)
    if not shown:
        return step_line(data, step)
    entries = [f"{printable(label)} {number(plain(data[name]))}" for name, label in shown.items()]
    return "  ".join([f"step {step}", *entries])


def step_line(data: Mapping[str, Any], step: int) -> str:
    entries = [f"{printable(name)}:{printable(plain(value))}" for name, value in data.items()]
    return " - ".join([f"step:{step}", *entries])


def number(value: Any) -> str:
    """Four significant digits, whole numbers in full; anything else escaped and short."""
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e9:
            return f"{value:.1f}"
        return f"{value:.4g}"
    return printable(value, max_characters=120)


class _MlflowLoggingAdapter:
    """Gives each metric a name that MLflow accepts; it refuses the `@` of `mean@4`, for one."""

    def __init__(self) -> None:
        self.logger = logging.getLogger(__name__)
        self._original: dict[str, str] = {}  # cleaned name -> the name it stands for

    def log(self, data: Mapping[str, Any], step: int) -> None:
        mlflow = optional_package("mlflow", backend="mlflow", extra="track")
        mlflow.log_metrics(metrics=self.clean(numbers_only(data)), step=step)

    def clean(self, data: Mapping[str, float]) -> dict[str, float]:
        cleaned: dict[str, float] = {}
        for name, value in data.items():
            key = clean_key(name)
            if key != name and key not in self._original:
                self.logger.warning("MLflow does not take the name %r; it is %r there", name, key)
            first = self._original.setdefault(key, name)
            if first != name:
                raise ValueError(
                    f"metrics {first!r} and {name!r} have the same MLflow name {key!r}; rename one"
                )
            cleaned[key] = value
        return cleaned


def clean_key(name: str) -> str:
    r"""`@` is `_at_`, repeated slashes are one, other characters outside `/\w.- :` are `_`."""
    name = re.sub(r"/{2,}", "/", name.replace("@", "_at_"))
    return re.sub(r"[^/\w.\- :]", "_", name)
