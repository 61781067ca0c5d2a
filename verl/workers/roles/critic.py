"""The critic's worker."""

import time

from verl.config.critic import FSDPCriticConfig
from verl.protocol import DataProto
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.utils.checkpoint.one_device import OneDeviceCheckpointManager
from verl.utils.flops_counter import FlopsCounter
from verl.workers.critic.dp_critic import DataParallelPPOCritic
from verl.workers.roles.building import build_engine
from verl.workers.roles.checkpointed import CheckpointedWorker
from verl.workers.roles.utilisation import utilisation

MESH = "critic"


class CriticWorker(CheckpointedWorker):
    """The value function of one rank."""

    def __init__(
        self, config: FSDPCriticConfig, *, device: str = "cpu", total_training_steps: int = -1
    ) -> None:
        super().__init__()
        self.config = config
        self.device = device
        self.total_training_steps = total_training_steps
        self._register_dispatch_collect_info(MESH, dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the value model and build its optimizer."""
        config = self.config
        config.optim.total_training_steps = self.total_training_steps
        self.engine = build_engine(
            config.model,
            config.model.fsdp_config,
            config.optim,
            device=self.device,
            max_grad_norm=config.grad_clip,
            is_value_model=True,
            gradient_checkpointing=config.model.enable_gradient_checkpointing,
        )
        self.flops = FlopsCounter(self.engine.module.config)
        self.critic = DataParallelPPOCritic(config, self.engine)
        self.checkpoints = OneDeviceCheckpointManager(
            self.engine.module, self.engine, checkpoint_config=config.checkpoint
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=MESH))
    def compute_values(self, data: DataProto) -> DataProto:
        """`values` of the response tokens."""
        values = self.critic.compute_values(data.batch)
        return DataProto.from_dict(tensors={"values": values.cpu()})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=MESH))
    def update_critic(self, data: DataProto) -> DataProto:
        """Train on the batch; the metrics come back in `meta_info["metrics"]`."""
        start, epochs = time.perf_counter(), self.config.ppo_epochs
        rows = self.config.ppo_mini_batch_size * self.config.rollout_n // self.world_size
        metrics = self.critic.update_critic(data.batch.to(self.engine.device), rows_per_step=rows)
        seconds = time.perf_counter() - start
        metrics.update(utilisation("critic", self.flops, data, seconds, passes=epochs))
        return DataProto(meta_info={"metrics": metrics})
