"""MLflow: a run per experiment, metrics under names that MLflow accepts."""

import json
import logging
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl.utils.environment import mlflow_tracking_uri, variable
from verl.utils.tracking_backends.base import (
    Sample,
    TrackingBackend,
    numbers_only,
    optional_package,
)
from verl.utils.tracking_backends.file import jsonable

logger = logging.getLogger(__name__)

MAX_PARAMETER_CHARACTERS = 500
PARAMETERS_PER_CALL = 100


class _MlflowLoggingAdapter:
    """Gives each metric a name that MLflow accepts; it refuses the `@` of `mean@4`, for one."""

    def __init__(self) -> None:
        self._original: dict[str, str] = {}  # cleaned name -> the name it stands for

    def log(self, data: Mapping[str, Any], step: int) -> None:
        mlflow = _mlflow()
        mlflow.log_metrics(metrics=self.clean(numbers_only(data)), step=step)

    def clean(self, data: Mapping[str, float]) -> dict[str, float]:
        cleaned: dict[str, float] = {}
        for name, value in data.items():
            key = clean_key(name)
            first = self._original.setdefault(key, name)
            if first != name:
                raise ValueError(
                    f"metrics {first!r} and {name!r} have the same MLflow name {key!r}; rename one"
                )
            cleaned[key] = value
        return cleaned


class MlflowBackend(TrackingBackend):
    """Continues the run `$MLFLOW_RUN_ID` if that is set; the configuration becomes parameters."""

    def __init__(self, project_name: str, experiment_name: str, config: Any = None) -> None:
        super().__init__(project_name, experiment_name, config)
        self._mlflow = _mlflow()
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


def clean_key(name: str) -> str:
    r"""`@` is `_at_`, repeated slashes are one, other characters outside `/\w.- :` are `_`."""
    name = re.sub(r"/{2,}", "/", name.replace("@", "_at_"))
    return re.sub(r"[^/\w.\- :]", "_", name)


def flat_parameters(config: Any, prefix: str = "") -> dict[str, str]:
    """Dotted names and short texts: MLflow parameters are strings of limited length."""
    if isinstance(config, Mapping):
        flat: dict[str, str] = {}
        for key, value in config.items():
            flat |= flat_parameters(value, f"{prefix}.{key}" if prefix else str(key))
        return flat
    return {clean_key(prefix): str(config)[:MAX_PARAMETER_CHARACTERS]}


def _mlflow() -> Any:
    return optional_package("mlflow", backend="mlflow", extra="track")
