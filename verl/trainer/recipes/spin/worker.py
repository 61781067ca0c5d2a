"""The policy's worker for SPIN: the policy can become the reference, which is then saved too."""

from pathlib import Path

import torch

from verl.config.trainer import CheckpointConfig
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.checkpoint.background import Receipt
from verl.utils.checkpoint.fsdp_checkpoint_manager import (
    FSDPCheckpointManager,
    as_it_is,
    checkpoint_manager,
)
from verl.utils.checkpoint.hf_model import own_weights
from verl.utils.checkpoint.piece_files import rank_name
from verl.utils.checkpoint.pieces import local_tensor
from verl.workers.roles.actor_rollout_ref import ActorRolloutRefWorker
from verl.workers.roles.worker import write_with_receipt


class SpinWorker(ActorRolloutRefWorker):
    """Actor, rollout, and a reference whose weights change."""

    reference_files: FSDPCheckpointManager

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        if self.is_ref:
            self.reference_files = checkpoint_manager(
                self.reference.engine.module,
                None,
                processing_class=self.tokenizer,
                checkpoint_config=CheckpointConfig(
                    save_contents=["model"], load_contents=["model"]
                ),
                rank=self.rank,
                world_size=self.world_size,
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @torch.no_grad()
    def update_reference(self) -> None:
        """Copy the policy's weights into the reference, each rank what it holds."""
        trained, kept = own_weights(self.engine.module), own_weights(self.reference.engine.module)
        for name, weight in kept.items():
            target, source = local_tensor(weight), local_tensor(trained[name])
            if target.shape != source.shape:
                raise ValueError(
                    f"{name} has {tuple(source.shape)} in the policy and {tuple(target.shape)} in "
                    "the reference on this rank; let actor_rollout_ref.ref.fsdp_config spread the "
                    "model as the actor's does"
                )
            target.copy_(source)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_reference(self, local_path: str) -> str:
        """Write the reference's weights; the receipt says when they are there, or why not."""
        folder = Path(local_path)
        receipt = Receipt(folder / rank_name("receipt", self.rank, self.world_size))
        write_with_receipt(self.reference_files.capture(as_it_is), folder, receipt)
        return str(receipt.path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_reference(self, local_path: str) -> None:
        """Continue with the reference of a folder that the caller has verified."""
        self.reference_files.load_checkpoint(local_path)
