"""The worker of PRIME's implicit reward model: a language model that is trained, and its reference.

    compute_ref_log_prob    the frozen reference, once per batch
    compute_rm_log_prob     the model as it is now
    update_rm               an optimizer step per mini-batch; the log-probs of the training passes

The role dispatches rows as the actor does, so gradients depend neither on micro-batches nor on the
number of ranks. The checkpoint has the weights and the optimizer; the reference never changes.
"""

from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor

from verl.algos.prime import implicit_loss
from verl.config.convert import omega_conf_to_dataclass
from verl.config.model import HFModelConfig
from verl.config.reward import FSDPRewardModelConfig
from verl.config.trainer import CheckpointConfig
from verl.data_plane.batch import tqbridge
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.checkpoint.fsdp_checkpoint_manager import checkpoint_manager
from verl.utils.device import get_device_name
from verl.utils.distributed import DEFAULT_TIMEOUT_SECONDS
from verl.utils.metric import Metric
from verl.workers.actor.dp_actor import Reference
from verl.workers.engine import BaseEngine, EngineRegistry, EngineSpec
from verl.workers.engine.base import Columns, TrainResult
from verl.workers.mini_batch import NUM_TOKENS, merge_reports, plan_for_one_rank, summarise
from verl.workers.roles.dispatch import (
    INFERENCE_COLUMNS,
    UpdateSettings,
    dispatch_inference,
    dispatch_update,
    gather_rows,
    model_rows,
    planned_passes,
    row_column,
    update_plan,
)
from verl.workers.roles.worker import CheckpointedWorker, RankWorker
from verl.workers.schedule import MicroBatching, StepPlan, UpdatePlan

MESH = "implicit_reward"
REF_LOG_PROBS, LOG_PROBS, ACCURACY = "rm_ref_log_probs", "rm_log_probs", "acc"
TEMPERATURE = "rm_temperature"
"""The entry of `meta_info` with the temperature of both models."""

ROW = "row_number"


class ImplicitRewardModel:
    """Training of the model in `engine` towards outcomes."""

    def __init__(self, config: FSDPRewardModelConfig, engine: BaseEngine) -> None:
        self.config = config
        self.engine = engine

    def update(
        self,
        data: TensorDict,
        *,
        rows_per_step: int,
        micro_batching: MicroBatching,
        temperature: float,
        plan: UpdatePlan | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """One optimizer step per mini-batch: log-probs of the passes, (B, T), and the metrics.

        On several ranks `data` is this rank's chunk and `plan` has the rows of each step.
        """
        plan = plan or plan_for_one_rank(
            data,
            self.engine,
            rows_per_step=rows_per_step,
            epochs=1,
            shuffle_seed=None,
            micro_batching=micro_batching,
        )
        data = data.copy()
        data[ROW] = torch.arange(1, len(data) + 1)  # 0: a pass without rows
        log_probs = torch.zeros_like(data[REF_LOG_PROBS])
        results = [self._step(data, step, temperature, log_probs) for step in plan.steps]
        self.engine.lr_scheduler_step()
        return log_probs, summarise(results, "reward_model")

    def _step(
        self, data: TensorDict, step: StepPlan, temperature: float, log_probs: Tensor
    ) -> tuple[TrainResult, dict[str, Metric]]:
        engine = self.engine
        result = engine.train_batch(
            data,
            partial(self.loss, num_sequences=step.global_batch_size, log_probs=log_probs),
            micro_batching=step.passes[engine.get_data_parallel_rank()],
            temperature=temperature,
        )
        return result, merge_reports(result.metrics, engine.get_data_parallel_group())

    def loss(
        self, columns: Columns, rows: TensorDict, *, num_sequences: int, log_probs: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """The share of some rows in the loss of a step; their log-probs go into `log_probs`."""
        mask, found = rows["response_mask"], columns["log_probs"]
        loss = implicit_loss(
            found,
            rows[REF_LOG_PROBS],
            mask,
            rows[ACCURACY],
            beta=self.config.model.beta_train,
            num_sequences=num_sequences,
        )
        if self.config.model.update == "after":
            numbers = rows[ROW].cpu()
            log_probs[numbers[numbers > 0] - 1] = found.detach()[rows[ROW] > 0].to(log_probs)
        return loss, {NUM_TOKENS: mask.sum(), "reward_model/dpo_loss": loss.detach()}


class ImplicitRewardWorker(RankWorker, CheckpointedWorker):
    """The implicit reward model of one rank, and its reference where that is a model of its own."""

    def __init__(
        self,
        config: FSDPRewardModelConfig | DictConfig,
        *,
        device: str | None = None,
        total_training_steps: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config = omega_conf_to_dataclass(config, FSDPRewardModelConfig)
        self.device = device or get_device_name()
        if total_training_steps is not None:
            config.model.optim.total_training_steps = total_training_steps
        self._sharing = config.model.fsdp_config.ulysses_sequence_parallel_size
        self.register_mesh(MESH, ranks_per_sequence=self._sharing)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model with its optimizer, and the frozen reference."""
        self.init_process_group(timeout_seconds=DEFAULT_TIMEOUT_SECONDS)
        model = self.config.model
        sequence_group = self.create_subgroups(self._sharing)
        spec = partial(
            EngineSpec,
            model=HFModelConfig(
                path=model.path,
                external_lib=model.external_lib,
                trust_remote_code=model.trust_remote_code,
                override_config=dict(model.override_config),
            ),
            engine=model.fsdp_config,
            device=self.device,
            sequence_group=sequence_group,
        )
        self.engine = EngineRegistry.new(
            spec(
                optimizer=model.optim,
                max_grad_norm=model.optim.clip_grad,
                gradient_checkpointing=model.enable_gradient_checkpointing,
            )
        )
        self.reward = ImplicitRewardModel(self.config, self.engine)
        self.checkpoints = checkpoint_manager(
            self.engine.module,
            self.engine,
            checkpoint_config=CheckpointConfig(),
            rank=self.rank,
            world_size=self.world_size,
        )
        if model.ref_type == "freeze":
            self.reference = Reference(
                EngineRegistry.new(spec(optimizer=None, path=model.ref_path or model.path))
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def inference_settings(self, model: str) -> MicroBatching:
        """How the rows of any pass are split."""
        config = self.config
        return MicroBatching.of(
            by_tokens=config.use_dynamic_bsz,
            tokens=config.forward_max_token_len_per_gpu,
            rows=config.micro_batch_size_per_gpu,
            ranks_per_sequence=self._sharing,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_settings(self) -> UpdateSettings:
        """How the rows of an update are split into optimizer steps and passes, over all ranks."""
        return UpdateSettings(
            rows_per_step=self.config.mini_batch_size * self.config.rollout_n,
            micro_batching=self.inference_settings("reward_model"),
        )

    @register(dispatch_mode=dispatch_inference(MESH, "reference"), columns=INFERENCE_COLUMNS)
    @tqbridge()
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`rm_ref_log_probs` of the responses."""
        log_probs = self.reference.compute_log_prob(
            model_rows(data),
            micro_batching=planned_passes(data) or self.inference_settings("reference"),
            temperature=data.meta_info[TEMPERATURE],
        )
        return DataProto.from_dict(tensors={REF_LOG_PROBS: log_probs.cpu(), **row_column(data)})

    @register(dispatch_mode=dispatch_inference(MESH, "reward_model"), columns=INFERENCE_COLUMNS)
    @tqbridge()
    def compute_rm_log_prob(self, data: DataProto) -> DataProto:
        """`rm_log_probs` of the responses under the model as it is."""
        columns = self.engine.infer_batch(
            model_rows(data),
            micro_batching=planned_passes(data) or self.inference_settings("reward_model"),
            temperature=data.meta_info[TEMPERATURE],
        )
        log_probs = columns["log_probs"].cpu()
        return DataProto.from_dict(tensors={LOG_PROBS: log_probs, **row_column(data)})

    @register(dispatch_mode={**dispatch_update(MESH), "collect_fn": partial(gather_rows, MESH)})
    @tqbridge()
    def update_rm(self, data: DataProto) -> DataProto:
        """Train on the batch: `rm_log_probs` of the training passes with `update=after`, else of
        no meaning; the metrics in `meta_info["metrics"]`."""
        settings = self.update_settings()
        log_probs, metrics = self.reward.update(
            model_rows(data),
            rows_per_step=settings.rows_per_step,
            micro_batching=settings.micro_batching,
            temperature=data.meta_info[TEMPERATURE],
            plan=update_plan(data),
        )
        return DataProto.from_dict(
            tensors={LOG_PROBS: log_probs.cpu(), **row_column(data)},
            meta_info={"metrics": metrics},
        )
