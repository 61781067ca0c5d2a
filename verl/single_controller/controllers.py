"""The back-ends by name, for `trainer.controller`. Ray is imported when `controllers["ray"]` is."""

from verl.single_controller.base.controller import Controller
from verl.utils.registry import Registry

controllers = Registry[Controller](
    "controller",
    local="verl.single_controller.local:CONTROLLER",
    ray="verl.single_controller.ray:CONTROLLER",
)
