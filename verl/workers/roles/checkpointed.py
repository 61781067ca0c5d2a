"""What every role that trains does about checkpoints; the caller commits and verifies them."""

from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker import Worker
from verl.utils.checkpoint.one_device import OneDeviceCheckpointManager


class CheckpointedWorker(Worker):
    """A worker whose `init_model` sets `checkpoints`."""

    checkpoints: OneDeviceCheckpointManager

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write the model and its optimizer into a folder that the caller commits."""
        self.checkpoints.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Continue from a folder that the caller has verified."""
        self.checkpoints.load_checkpoint(local_path, hdfs_path, del_local_after_load)
