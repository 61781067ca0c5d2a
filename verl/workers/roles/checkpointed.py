"""What every role that trains does about checkpoints; the caller commits and verifies them.

Each rank leaves a receipt that tells the caller when its files are written. With
`checkpoint.async_save` it copies the state to host memory and returns; a thread writes the copies
while training goes on.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker import Worker
from verl.utils.checkpoint.background import Background, Receipt
from verl.utils.checkpoint.fsdp_checkpoint_manager import (
    FSDPCheckpointManager,
    Write,
    as_it_is,
    refuse_what_concerns_steps,
)
from verl.utils.checkpoint.layout import as_os_error
from verl.utils.checkpoint.piece_files import rank_name
from verl.workers.engine.residency import HostMemory, wait_for_copies


class CheckpointedWorker(Worker):
    """A worker whose `init_model` sets `checkpoints`."""

    checkpoints: FSDPCheckpointManager

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        super().__init__(cuda_visible_devices)
        self._writer = Background("checkpoint-writer")
        self._host = HostMemory()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> str:
        """Write the model and its optimizer into a folder that the caller commits.

        Returns the receipt that says when all is written, or why it is not.
        """
        refuse_what_concerns_steps(hdfs_path=hdfs_path, max_ckpt_to_keep=max_ckpt_to_keep)
        manager, folder = self.checkpoints, Path(local_path)
        receipt = Receipt(folder / rank_name("receipt", manager.rank, manager.world_size))
        if not manager.checkpoint_config.async_save:
            write_with_receipt(manager.capture(as_it_is), folder, receipt)
            return str(receipt.path)
        self._writer.finish()  # it reads the host memory that is written now
        copies = HostCopies(self._host)
        writes = manager.capture(copies.keep)
        copies.complete()
        self._writer.start(lambda: write_with_receipt(writes, folder, receipt))
        return str(receipt.path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Continue from a folder that the caller has verified."""
        self.checkpoints.load_checkpoint(local_path, hdfs_path, del_local_after_load)


class HostCopies:
    """What one save keeps in host memory; a tensor that is asked for twice is copied once."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._copies: dict[Any, Tensor] = {}
        self._devices: set[torch.device] = set()

    def keep(self, name: str, tensor: Tensor) -> Tensor:
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in self._copies:
            self._copies[place] = self._memory.put(name, tensor)
            self._devices.add(tensor.device)
        return self._copies[place]

    def complete(self) -> None:
        """Return when every copy is there; the device may still be at it."""
        for device in self._devices:
            wait_for_copies(device)


def write_with_receipt(writes: list[Write], folder: Path, receipt: Receipt) -> None:
    """What the disk refuses is the caller's to handle, on whatever machine it is; any other error
    is raised here too."""
    try:
        for write in writes:
            write(folder)
    except Exception as error:
        receipt.end(error)
        if as_os_error(error) is None:
            raise
    else:
        receipt.end()
