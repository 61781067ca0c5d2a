"""PRIME's stages: token rewards of the implicit model in `annotate`, its advantages in
`assign_credit`.

    rollout -> score -> annotate                                          -> assign_credit -> update
               outcome   log-probs; reference, implicit model: rm_scores     two rewards

The implicit model sees a batch after its prompts were chosen and its responses graded, so it is
trained on exactly the rows that the policy is trained on.

The worker of PRIME's implicit reward model: a language model that is trained, and its reference.

    compute_ref_log_prob    the frozen reference, once per batch
    compute_rm_log_prob     the model as it is now
    update_rm               an optimizer step per mini-batch; the log-probs of the training passes

The role dispatches rows as the actor does, so gradients depend neither on micro-batches nor on the
number of ranks. The checkpoint has the weights and the optimizer; the reference never changes.
"""

import math
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor

from verl.algos.prime import (
    PrimeWeights,
    implicit_loss,
    implicit_rewards,
    pair_accuracy,
    prime_advantage,
    shaped_rewards,
)
from verl.config.convert import omega_conf_to_dataclass
from verl.config.model import HFModelConfig
from verl.config.ppo import PPOConfig
from verl.config.reward import FSDPRewardModelConfig
from verl.config.trainer import CheckpointConfig
from verl.data_plane.batch import tqbridge
from verl.protocol import DataProto
from verl.protocol.padded import SESSION_UID
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.context import StepContext
from verl.trainer.ppo.placing import REWARD_POOL, pool_of
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.ppo.tripwires import require_finite
from verl.trainer.ppo.utils import Role
from verl.trainer.task_runner import TaskRunner
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

SCORES = "rm_scores"


class PrimeTrainer(PPOTrainer):
    """PPO whose advantages come from outcomes and from an implicit model's token rewards."""

    def init_workers(self) -> None:
        super().init_workers()
        self.checkpoint_manager.roles["reward_model"] = self.rm_wg

    def annotate(self, batch: DataProto, step: StepContext) -> DataProto:
        """`rm_scores` and `acc` too; the implicit model is trained as its `update` option says."""
        batch = super().annotate(batch, step)
        refuse_split_sessions(batch)
        batch.batch[ACCURACY] = outcomes(batch)
        with step.report.timed("reward_model"):
            batch = self._with_reference(batch)
            batch = self._with_token_rewards(batch, step)
        require_finite(batch, SCORES)
        return batch

    def _with_reference(self, batch: DataProto) -> DataProto:
        section = self.config.reward_model
        assert isinstance(section, FSDPRewardModelConfig)  # validation refuses others
        if section.model.ref_type == "policy":
            batch.meta_info[TEMPERATURE] = self.config.actor_rollout_ref.rollout.temperature
            batch.batch[REF_LOG_PROBS] = batch.batch["old_log_probs"].clone()
            return batch
        batch.meta_info[TEMPERATURE] = 1.0
        return batch.union(self.rm_wg.compute_ref_log_prob(batch))

    def _with_token_rewards(self, batch: DataProto, step: StepContext) -> DataProto:
        """`rm_scores`, from the model before, during or after its update."""
        section = self.config.reward_model
        assert isinstance(section, FSDPRewardModelConfig)
        update, found = section.model.update, DataProto()
        if update in ("reverse", "none"):
            found = self.rm_wg.compute_rm_log_prob(batch)
        if update != "none":
            trained = self.rm_wg.update_rm(batch)
            step.report.merge(trained.meta_info.pop("metrics"))
            found = trained if update == "after" else found
        if update == "before":
            found = self.rm_wg.compute_rm_log_prob(batch)
        mask = batch.batch["response_mask"]
        rewards = implicit_rewards(
            found.batch[LOG_PROBS], batch.batch[REF_LOG_PROBS], mask, beta=section.model.beta_train
        )
        self._report(rewards.sum(-1), batch, step)
        batch.batch[SCORES] = shaped_rewards(
            rewards, mask, granularity=section.prime_granularity, norm=section.prime_norm
        )
        return batch

    def _report(self, logits: Tensor, batch: DataProto, step: StepContext) -> None:
        accuracy = batch.batch[ACCURACY]
        is_right = (logits > 0) == (accuracy > 0.5)
        step.report.add("reward_model/reward", logits.mean().item())
        step.report.add("reward_model/dpo_acc_abs", is_right.float().mean().item())
        pairs = pair_accuracy(logits, accuracy, batch.non_tensor_batch["uid"])
        if not math.isnan(pairs):
            step.report.add("reward_model/dpo_acc", pairs)

    def assign_credit(self, batch: DataProto, step: StepContext) -> DataProto:
        """Rewards and the rollout's correction as usual; then PRIME's advantages and returns."""
        batch = super().assign_credit(batch, step)
        algorithm = self.config.algorithm
        with step.report.timed("adv"):
            batch.batch["advantages"], batch.batch["returns"] = prime_advantage(
                batch.batch[SCORES],
                batch.batch[ACCURACY],
                batch.batch["response_mask"],
                batch.non_tensor_batch["uid"],
                PrimeWeights(
                    process=algorithm.reward_dpo_coef,
                    outcome=algorithm.reward_gt_coef,
                    is_scaled=algorithm.prime_baseline == "scaled",
                ),
            )
        require_finite(batch, "advantages", "returns")
        return batch


class PrimeRunner(TaskRunner):
    """Trains a policy and the implicit reward model that rewards its tokens."""

    trainer_class = PrimeTrainer

    def add_reward_model_worker(self, config: PPOConfig) -> None:
        self.role_worker_mapping[Role.RewardModel] = ImplicitRewardWorker
        has_pool = config.reward_model.enable_resource_pool
        self.mapping[Role.RewardModel] = (
            REWARD_POOL if has_pool else pool_of(config, "reward_model")
        )


def outcomes(batch: DataProto) -> Tensor:
    """(B,) in [0, 1]: `acc` as graders report it, else the score."""
    scores = batch.batch["token_level_scores"].sum(-1)
    reported = batch.non_tensor_batch.get(ACCURACY)
    values = scores if reported is None else torch.tensor([float(v) for v in reported]).to(scores)
    outside = values[(values < 0) | (values > 1)]
    if len(outside):
        what = "the score" if reported is None else "acc"
        raise ValueError(
            f"{what} of a response is {outside[0].item():g}; PRIME trains its reward model on how "
            "right a response is, from 0 to 1: let the reward function return that, or report it "
            'as "acc" beside its score'
        )
    return values


def refuse_split_sessions(batch: DataProto) -> None:
    names = batch.non_tensor_batch.get(SESSION_UID)
    if names is not None and len(set(names)) < len(names):
        raise ValueError(
            f"{len(names)} rows are {len(set(names))} sessions; PRIME's reward model reads a whole "
            "response in one row: use agent loops that neither fork nor compact conversations"
        )


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
        self.keep_checkpoints(self.engine, CheckpointConfig())
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
