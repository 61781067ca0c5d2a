"""One rank of a supervised run that a controller drives, one call per step.

    driver   start          advance   advance   ...   finish
    rank 0   build, meet    step 1    step 2          what to tell the user
    rank 1   build, meet    step 1    step 2

Each call has the controller's deadline, so a rank that dies or hangs ends the run; inside a call
ranks talk to each other as they do under `torchrun`, and rank 0 reports and writes.
"""

from typing import Any

from verl.config.load import load_config
from verl.config.sft import SFTEngineConfig
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.sft.launch import SILENT_RANK_SECONDS, ending
from verl.trainer.sft.trainer import SFTTrainer
from verl.utils.distributed import (
    destroy_global_process_group,
    initialize_global_process_group_ray,
)


class SFTWorker(Worker):
    """One rank; `config` is the plain dictionary of an `SFTEngineConfig`."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config: SFTEngineConfig = load_config(config, SFTEngineConfig).checked()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start(self) -> int:
        """Meet the other ranks, load the model; the number of steps of the run."""
        if self.world_size > 1:
            initialize_global_process_group_ray(SILENT_RANK_SECONDS)
        self.trainer = SFTTrainer(self.config)
        self._steps = self.trainer.steps()
        return self.trainer.total_steps

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def advance(self) -> int | None:
        """Make a step and give its number; None after the last."""
        return next(self._steps, None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish(self) -> str:
        """Leave the other ranks; a text on how the run went."""
        destroy_global_process_group()
        return ending(self.trainer)
