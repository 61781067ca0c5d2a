"""Where metrics go: the names of `trainer.logger` and the class that stands behind each.

A back-end is loaded when a run names it, so none of the optional packages is needed to import
this one. To add a back-end, subclass `TrackingBackend` and register it here under a name.
"""

from verl.utils.registry import Registry
from verl.utils.tracking_backends.base import Sample, TrackingBackend, optional_package

tracking_backends = Registry[type[TrackingBackend]](
    "tracking backend",
    console="verl.utils.tracking_backends.console:ConsoleBackend",
    file="verl.utils.tracking_backends.file:FileBackend",
    tensorboard="verl.utils.tracking_backends.tensorboard:TensorboardBackend",
    mlflow="verl.utils.tracking_backends.mlflow:MlflowBackend",
    wandb="verl.utils.tracking_backends.wandb:WandbBackend",
    vemlp_wandb="verl.utils.tracking_backends.wandb:VemlpWandbBackend",
    swanlab="verl.utils.tracking_backends.hosted:SwanlabBackend",
    clearml="verl.utils.tracking_backends.hosted:ClearmlBackend",
    trackio="verl.utils.tracking_backends.hosted:TrackioBackend",
)

__all__ = ["Sample", "TrackingBackend", "optional_package", "tracking_backends"]
