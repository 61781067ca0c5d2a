"""The critic's worker."""

import time

from omegaconf import DictConfig

from verl.config.convert import omega_conf_to_dataclass
from verl.config.critic import CriticConfig, FSDPCriticConfig
from verl.data_plane.batch import tqbridge
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.utils.distributed import DEFAULT_TIMEOUT_SECONDS
from verl.utils.flops_counter import FlopsCounter
from verl.workers.critic.dp_critic import DataParallelPPOCritic, rows_per_pass
from verl.workers.engine import EngineRegistry, EngineSpec
from verl.workers.roles.dispatch import (
    INFERENCE_COLUMNS,
    UpdateSettings,
    dispatch_inference,
    dispatch_update,
    model_rows,
    planned_passes,
    row_column,
    update_plan,
)
from verl.workers.roles.worker import (
    CheckpointedWorker,
    RankWorker,
    engine_options,
    engine_section,
    ranks_per_sequence,
    update_passes,
    utilisation,
)
from verl.workers.schedule import MicroBatching

MESH = "critic"


class CriticWorker(RankWorker, CheckpointedWorker):
    """The value function of one rank."""

    def __init__(
        self,
        config: CriticConfig | DictConfig,
        *,
        device: str | None = None,
        total_training_steps: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config = omega_conf_to_dataclass(config, FSDPCriticConfig)
        self.device = device or get_device_name()
        if total_training_steps is not None:
            config.optim.total_training_steps = total_training_steps
        self.register_rows(MESH, engine_section(self.config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the value model and build its optimizer."""
        config = self.config
        self.init_process_group(timeout_seconds=DEFAULT_TIMEOUT_SECONDS)
        options = engine_options(config)
        if isinstance(config, FSDPCriticConfig):  # Megatron has groups and options of its own
            model = config.model
            options["gradient_checkpointing"] = model.enable_gradient_checkpointing
            options["activation_offload"] = model.enable_activation_offload
            size = model.fsdp_config.ulysses_sequence_parallel_size
            options["sequence_group"] = self.create_subgroups(size)
        self.engine = EngineRegistry.new(
            EngineSpec(model=config.model, device=self.device, model_type="value_model", **options)
        )
        self.flops = FlopsCounter(self.engine.module.config)
        self.critic = DataParallelPPOCritic(config, self.engine)
        self.keep_checkpoints(self.engine, config.checkpoint)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def inference_settings(self, model: str) -> MicroBatching:
        """How the rows of a pass without gradients are cut."""
        config = self.config
        return MicroBatching.of(
            by_tokens=config.use_dynamic_bsz,
            tokens=config.forward_max_token_len_per_gpu,
            rows=rows_per_pass(config),
            ranks_per_sequence=ranks_per_sequence(engine_section(config)),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_settings(self) -> UpdateSettings:
        """How the rows of an update are cut into optimizer steps and passes, over all ranks."""
        config = self.config
        return UpdateSettings(
            rows_per_step=config.ppo_mini_batch_size * config.rollout_n,
            micro_batching=MicroBatching.of(
                by_tokens=config.use_dynamic_bsz,
                tokens=config.ppo_max_token_len_per_gpu,
                rows=config.ppo_micro_batch_size_per_gpu,
                ranks_per_sequence=ranks_per_sequence(engine_section(config)),
            ),
            epochs=config.ppo_epochs,
            shuffle_seed=config.data_loader_seed if config.shuffle else None,
        )

    @register(dispatch_mode=dispatch_inference(MESH, "critic"), columns=INFERENCE_COLUMNS)
    @tqbridge()
    def compute_values(self, data: DataProto) -> DataProto:
        """`values` of the response tokens."""
        values = self.critic.compute_values(model_rows(data), passes=planned_passes(data))
        return DataProto.from_dict(tensors={"values": values.cpu(), **row_column(data)})

    @register(dispatch_mode=dispatch_update(MESH))
    @tqbridge()
    def update_critic(self, data: DataProto) -> DataProto:
        """Train on the batch; the metrics come back in `meta_info["metrics"]`."""
        start = time.perf_counter()
        metrics = self.critic.update_critic(
            model_rows(data),
            rows_per_step=self.update_settings().rows_per_step,
            plan=update_plan(data),
        )
        seconds = time.perf_counter() - start
        passes = update_passes(self.config.ppo_epochs, self.engine.module)
        metrics.update(utilisation("critic", self.flops, data, seconds, passes=passes))
        return DataProto(meta_info={"metrics": metrics})
