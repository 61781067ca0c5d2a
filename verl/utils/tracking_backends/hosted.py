"""The smaller services: SwanLab, ClearML and trackio, each a thin layer over its own package."""

from collections.abc import Iterable, Mapping
from typing import Any

from verl.utils.environment import variable
from verl.utils.tracking_backends.base import (
    Sample,
    TrackingBackend,
    numbers_only,
    optional_package,
    plain,
)
from verl.utils.tracking_backends.file import jsonable


class SwanlabBackend(TrackingBackend):
    """`$SWANLAB_API_KEY` logs in, `$SWANLAB_LOG_DIR` and `$SWANLAB_MODE` say where it writes."""

    def __init__(self, project_name: str, experiment_name: str, config: Any = None) -> None:
        super().__init__(project_name, experiment_name, config)
        self._swanlab = optional_package("swanlab", backend="swanlab")
        api_key = variable("SWANLAB_API_KEY")
        if api_key:
            self._swanlab.login(api_key)
        self._swanlab.init(
            project=project_name,
            experiment_name=experiment_name,
            config={"FRAMEWORK": "verl", **jsonable(config or {})},
            logdir=variable("SWANLAB_LOG_DIR", "swanlog"),
            mode=variable("SWANLAB_MODE", "cloud"),
        )

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._swanlab.log(numbers_only(data), step=step)

    def log_samples(self, samples: Iterable[Sample], step: int) -> None:
        texts = [
            self._swanlab.Text(
                f"input: {sample[0]}\n\n---\n\noutput: {sample[1]}\n\n---\n\nscore: {sample[2]}",
                caption=f"sample {number}",
            )
            for number, sample in enumerate(samples, start=1)
        ]
        self._swanlab.log({"val/generations": texts}, step=step)

    def finish(self) -> None:
        self._swanlab.finish()


class ClearmlBackend(TrackingBackend):
    """`actor/entropy` is series `entropy` of the plot `actor`."""

    def __init__(self, project_name: str, experiment_name: str, config: Any = None) -> None:
        super().__init__(project_name, experiment_name, config)
        clearml = optional_package("clearml", backend="clearml")
        self._task = clearml.Task.init(
            task_name=experiment_name,
            project_name=project_name,
            continue_last_task=True,
            output_uri=False,
        )
        self._task.connect_configuration(jsonable(config or {}), name="Hyperparameters")

    def log(self, data: Mapping[str, Any], step: int) -> None:
        report = self._task.get_logger()
        for name, value in numbers_only(data).items():
            title, _, series = name.partition("/")
            report.report_scalar(title=title, series=series or title, value=value, iteration=step)

    def log_samples(self, samples: Iterable[Sample], step: int) -> None:
        rows = [["step", "input", "output", "score"]]
        rows += [[step, *map(plain, sample)] for sample in samples]
        self._task.get_logger().report_table(
            title="val", series="generations", table_plot=rows, iteration=step
        )

    def finish(self) -> None:
        self._task.close()


class TrackioBackend(TrackingBackend):
    def __init__(self, project_name: str, experiment_name: str, config: Any = None) -> None:
        super().__init__(project_name, experiment_name, config)
        self._trackio = optional_package("trackio", backend="trackio")
        self._trackio.init(
            project=project_name, name=experiment_name, config=jsonable(config or {})
        )

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._trackio.log({name: plain(value) for name, value in data.items()}, step=step)

    def finish(self) -> None:
        self._trackio.finish()
