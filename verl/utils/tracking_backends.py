"""Tracking back-ends of other packages; each package is imported when a run opens its back-end.

TensorBoard, MLflow, Weights & Biases (also as Volcengine's platform), SwanLab, ClearML, Trackio.
"""

import json
import tempfile
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from verl.utils.environment import mlflow_tracking_uri, tensorboard_dir, variable
from verl.utils.py_functional import printable
from verl.utils.tracking import (
    Sample,
    TrackingBackend,
    _MlflowLoggingAdapter,
    clean_key,
    jsonable,
    numbers_only,
    optional_package,
    plain,
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


MAX_PARAMETER_CHARACTERS = 500
PARAMETERS_PER_CALL = 100


class MlflowBackend(TrackingBackend):
    """Continues the run `$MLFLOW_RUN_ID` if that is set; the configuration becomes parameters."""

    def __init__(self, project_name: str, experiment_name: str, config: Any = None) -> None:
        super().__init__(project_name, experiment_name, config)
        self._mlflow = optional_package("mlflow", backend="mlflow", extra="track")
        self._mlflow.set_tracking_uri(mlflow_tracking_uri())
        self._mlflow.set_experiment(project_name)
        run_id = variable("MLFLOW_RUN_ID") or None
        self._mlflow.start_run(run_id=run_id, run_name=experiment_name)
        parameters = list(flat_parameters(jsonable(config or {})).items())
        for start in range(0, len(parameters), PARAMETERS_PER_CALL):
            self._mlflow.log_params(dict(parameters[start : start + PARAMETERS_PER_CALL]))
        self._adapter = _MlflowLoggingAdapter()

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._adapter.log(data=data, step=step)

    def log_samples(self, samples: Iterable[Sample], step: int) -> None:
        rows = [{"input": s[0], "output": s[1], "score": jsonable(s[2])} for s in samples]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"val_step{step}.json")
            path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
            self._mlflow.log_artifact(str(path))

    def finish(self) -> None:
        self._mlflow.end_run()


def flat_parameters(config: Any, prefix: str = "") -> dict[str, str]:
    """Dotted names and short texts: MLflow parameters are strings of limited length."""
    if isinstance(config, Mapping):
        flat: dict[str, str] = {}
        for key, value in config.items():
            flat |= flat_parameters(value, f"{prefix}.{key}" if prefix else str(key))
        return flat
    return {clean_key(prefix): str(config)[:MAX_PARAMETER_CHARACTERS]}


class WandbLike(TrackingBackend):
    """What follows once a run is open. `_run` logs, `_package` makes tables."""

    def __init__(self, project_name: str, experiment_name: str, config: Any = None) -> None:
        super().__init__(project_name, experiment_name, config)
        self._package, self._run = self._open()
        self._sample_rows: list[list[Any]] = []

    @abstractmethod
    def _open(self) -> tuple[Any, Any]:
        """The package and the run, or the package twice where it holds the run itself."""

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._run.log({name: plain(value) for name, value in data.items()}, step=step)

    def log_samples(self, samples: Iterable[Sample], step: int) -> None:
        # A logged table cannot grow, so each one holds all rows so far.
        self._sample_rows += [[step, *map(plain, sample)] for sample in samples]
        columns = ["step", "input", "output", "score"]
        table = self._package.Table(columns=columns, data=list(self._sample_rows))
        self._run.log({"val/generations": table}, step=step)

    def finish(self) -> None:
        self._run.finish(exit_code=0)


class WandbBackend(WandbLike):
    """A run of entity `$WANDB_ENTITY`; `trainer.wandb_proxy` is the HTTPS proxy to go through."""

    def _open(self) -> tuple[Any, Any]:
        wandb = optional_package("wandb", backend="wandb", extra="track")
        proxy = wandb_proxy(self.config)
        settings = {"settings": wandb.Settings(https_proxy=proxy)} if proxy else {}
        run = wandb.init(
            project=self.project_name,
            name=self.experiment_name,
            entity=variable("WANDB_ENTITY") or None,
            config=jsonable(self.config or {}),
            **settings,
        )
        return wandb, run


class VemlpWandbBackend(WandbLike):
    """Keys `$VOLC_ACCESS_KEY_ID`, `$VOLC_SECRET_ACCESS_KEY`; region `$MLP_TRACKING_REGION`."""

    def _open(self) -> tuple[Any, Any]:
        platform = optional_package("volcengine_ml_platform", backend="vemlp_wandb")
        platform.init(
            ak=variable("VOLC_ACCESS_KEY_ID"),
            sk=variable("VOLC_SECRET_ACCESS_KEY"),
            region=variable("MLP_TRACKING_REGION"),
        )
        wandb = optional_package("volcengine_ml_platform.wandb", backend="vemlp_wandb")
        wandb.init(
            project=self.project_name,
            name=self.experiment_name,
            config=jsonable(self.config or {}),
            sync_tensorboard=True,
        )
        return wandb, wandb


def wandb_proxy(config: Any) -> str | None:
    trainer = config["trainer"] if config and "trainer" in config else {}
    return trainer.get("wandb_proxy", None)


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
        trackio = optional_package("trackio", backend="trackio")
        self._run = trackio_run(trackio, project_name, experiment_name, jsonable(config or {}))

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._run.log({name: plain(value) for name, value in data.items()}, step=step)

    def finish(self) -> None:
        end_trackio_run(self.project_name, self.experiment_name)


_trackio_runs: dict[tuple[str, str], list[Any]] = {}  # as often as it is held


def trackio_run(trackio: Any, project_name: str, experiment_name: str, config: Any = None) -> Any:
    """Hold the run that metrics and traces share: a second `trackio.init` would end the first run,
    and `trackio.log` finds the run only on the thread that began it."""
    held = _trackio_runs.setdefault((project_name, experiment_name), [])
    if held:
        held.append(held[0])
    else:
        names = {"project": project_name, "name": experiment_name}
        held.append(trackio.init(**names, config=config, resume="allow"))
    return held[0]


def end_trackio_run(project_name: str, experiment_name: str) -> None:
    """Let go of the run; the last holder writes out what was logged."""
    held = _trackio_runs[project_name, experiment_name]
    run = held.pop()
    if not held:
        del _trackio_runs[project_name, experiment_name]
        run.finish()
