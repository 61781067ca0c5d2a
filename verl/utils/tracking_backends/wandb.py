"""Weights & Biases, and Volcengine's ML platform, which speaks the same interface."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from verl.utils.environment import variable
from verl.utils.tracking_backends.base import Sample, TrackingBackend, optional_package, plain
from verl.utils.tracking_backends.file import jsonable


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
