"""What the workers of all roles have in common: their ranks, their checkpoints, their utilisation.

Ranks that share a sequence (`ulysses_sequence_parallel_size` consecutive ones) get the same rows;
the first of them returns the result. Roles in one process share its process group. A role that
trains writes checkpoints, which the caller commits and verifies: each rank leaves a receipt that
tells when its files are written. With `checkpoint.async_save` it copies the state to host memory
and returns; a thread writes the copies while training goes on.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.config.actor import ActorConfig, McoreActorConfig
from verl.config.critic import CriticConfig, FSDPCriticConfig, McoreCriticConfig
from verl.config.engine import FSDPEngineConfig, McoreEngineConfig
from verl.config.ref import McoreRefConfig, RefConfig
from verl.config.trainer import CheckpointConfig
from verl.models.lora import has_lora
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker import Worker
from verl.utils.checkpoint.background import Background, Receipt
from verl.utils.checkpoint.fsdp_checkpoint_manager import (
    FSDPCheckpointManager,
    Write,
    as_it_is,
    checkpoint_manager,
    refuse_what_concerns_steps,
)
from verl.utils.checkpoint.hf_model import ProcessingClass
from verl.utils.checkpoint.layout import as_os_error
from verl.utils.checkpoint.piece_files import rank_name
from verl.utils.distributed import initialize_global_process_group
from verl.utils.flops_counter import FlopsCounter
from verl.workers.engine import BaseEngine
from verl.workers.engine.megatron.layout import Layout
from verl.workers.engine.residency import HostMemory, wait_for_copies


class RankWorker(Worker):
    """A role's worker; `config` is its section, `device` the kind of device it runs on."""

    config: Any
    device: str

    def init_process_group(self, *, timeout_seconds: float) -> None:
        """Take this rank's device and connect to the others; nothing to do alone."""
        if self.world_size > 1:
            initialize_global_process_group(timeout_seconds)

    def register_rows(self, mesh_name: str, engine: FSDPEngineConfig | McoreEngineConfig) -> None:
        """Register which rows this rank's part of a model gets, and whether its result is
        collected."""
        dp_rank, is_collect = share_of_rows(engine, self.rank, self.world_size)
        self._register_dispatch_collect_info(mesh_name, dp_rank=dp_rank, is_collect=is_collect)

    def register_mesh(self, mesh_name: str, *, ranks_per_sequence: int) -> None:
        """The same where so many consecutive ranks get the same rows."""
        self._register_dispatch_collect_info(
            mesh_name,
            dp_rank=self.rank // ranks_per_sequence,
            is_collect=self.rank % ranks_per_sequence == 0,
        )

    def create_subgroups(self, size: int) -> dist.ProcessGroup | None:
        """The group of `size` consecutive ranks that this one is in; None if it is alone there.

        All ranks must call it, in the same order.
        """
        if size == 1:
            return None
        starts = range(0, self.world_size, size)
        groups = [dist.new_group(list(range(first, first + size))) for first in starts]
        group = groups[self.rank // size]
        assert isinstance(group, dist.ProcessGroup)
        return group


class CheckpointedWorker(Worker):
    """A worker whose `init_model` calls `keep_checkpoints`."""

    checkpoints: FSDPCheckpointManager

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        super().__init__(cuda_visible_devices)
        self._writer = Background("checkpoint-writer")
        self._host = HostMemory()

    def keep_checkpoints(
        self,
        engine: BaseEngine,
        config: CheckpointConfig,
        processing_class: ProcessingClass | None = None,
    ) -> None:
        self.checkpoints = checkpoint_manager(
            engine.module,
            engine,
            processing_class=processing_class,
            checkpoint_config=config,
            rank=self.rank,
            world_size=self.world_size,
        )

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
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._copies:
            self._copies[key] = self._memory.put(name, tensor)
            self._devices.add(tensor.device)
        return self._copies[key]

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


def update_passes(epochs: int, model: nn.Module) -> float:
    """What training over the rows costs, in passes.

    The gradients of the weights are a third of a pass; with adapters nearly all are left out.
    """
    return epochs * (2 / 3 if has_lora(model) else 1)


def utilisation(
    role: str, flops: FlopsCounter, data: DataProto, seconds: float, *, passes: float
) -> dict[str, float]:
    """The share of the device's peak that `passes` passes over the rows reached.

    A pass is forward and backward, forward alone a third. Empty where the peak is not known, as on
    a CPU.
    """
    lengths = data.batch["attention_mask"].sum(-1).tolist()
    share = flops.utilisation(lengths, seconds, passes=passes)
    return {} if share is None else {f"perf/mfu/{role}": share}


# ---- what the section of a role says of its engine -----------------------------------------------

MEGATRON = (McoreActorConfig, McoreCriticConfig, McoreRefConfig)


def engine_section(
    role: ActorConfig | CriticConfig | RefConfig,
) -> FSDPEngineConfig | McoreEngineConfig:
    """How the role's model is spread over ranks."""
    if isinstance(role, MEGATRON):
        return role.megatron
    section: Any = role.model if isinstance(role, FSDPCriticConfig) else role
    return section.fsdp_config


def engine_options(role: Any) -> dict[str, Any]:
    """Arguments of `EngineSpec` of a role that is trained."""
    options: dict[str, Any] = {"engine": engine_section(role), "optimizer": role.optim}
    if isinstance(role, MEGATRON):
        return {**options, "backend": "megatron", "max_grad_norm": role.optim.clip_grad}
    return {
        **options,
        "max_grad_norm": role.grad_clip,
        "probe_micro_batch": role.probe_micro_batch,
    }


def ranks_per_sequence(engine: FSDPEngineConfig | McoreEngineConfig) -> int:
    """Ranks that split the tokens of a micro-batch, each with the budget of one device."""
    if isinstance(engine, McoreEngineConfig):
        return engine.context_parallel_size
    return engine.ulysses_sequence_parallel_size


def share_of_rows(
    engine: FSDPEngineConfig | McoreEngineConfig, rank: int, num_ranks: int
) -> tuple[int, bool]:
    """Which shard of the rows a rank gets, and whether its results are collected."""
    if isinstance(engine, McoreEngineConfig):
        layout = Layout.of(engine, num_ranks)
        return layout.data_rank(rank), layout.leads(rank)
    size = engine.ulysses_sequence_parallel_size
    return rank // size, rank % size == 0
