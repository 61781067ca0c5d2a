"""`TrainingWorker`: a model, an optimizer and a loss function of the caller's, on one rank.

    worker = TrainingWorker(TrainingWorkerConfig(model_config=..., optimizer_config=...))
    worker.reset()
    worker.set_loss_fn(loss_fn)
    worker.train_batch(data)          one optimizer step
    worker.train_mini_batch(data)     one for every `mini_batch_size` rows
    worker.infer_batch(data)          columns, no step

A batch has the columns of a rollout: `input_ids`, `attention_mask`, `position_ids` (B, L),
`responses` and `response_mask` (B, T). No page states the rest of the interface, which is as
callers of an engine would write it. Settings are in the engine's section, and a batch may state its
own in `meta_info` (in a TensorDict: as batch-wide values): `Choices` has their names.

The loss function is called for every micro-batch as `loss_fn(model_output=, data=, dp_group=)` and
gives a loss and a dictionary of metrics. `model_output` has `log_probs` and `entropy`, or `values`,
each (B, T). `data` has the rows, and under `dp_size`, `batch_num_tokens` and `global_batch_size`
the counts of the whole step: a loss that divides by these has the same gradient however rows are
cut and spread over ranks.
"""

from collections.abc import Callable
from statistics import fmean
from typing import Any, TypedDict, cast

import torch.distributed as dist
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor

from verl.config.convert import omega_conf_to_dataclass
from verl.config.engine import FSDPEngineConfig, McoreEngineConfig, TrainingWorkerConfig
from verl.data_plane.batch import StoredBatch
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.utils.distributed import DEFAULT_TIMEOUT_SECONDS
from verl.utils.metric import Metric
from verl.utils.tensordict_utils import assign_non_tensor
from verl.workers.engine import BaseEngine, EngineRegistry, EngineSpec
from verl.workers.engine.base import Columns, TrainResult
from verl.workers.mini_batch import NUM_TOKENS, merge_reports, plan_for_one_rank
from verl.workers.roles.dispatch import (
    INFERENCE_COLUMNS,
    UpdateSettings,
    as_batch,
    dispatch_inference,
    dispatch_update,
    model_rows,
    planned_passes,
    row_column,
    update_plan,
)
from verl.workers.roles.worker import CheckpointedWorker, RankWorker, ranks_per_sequence
from verl.workers.schedule import MicroBatching, StepPlan

MESH = "train"
LossFn = Callable[..., tuple[Tensor, dict[str, Any]]]


class Choices(TypedDict, total=False):
    """What a batch may say about itself; the engine's section has the defaults."""

    mini_batch_size: int
    """Rows of an optimizer step, over all ranks; for `train_mini_batch`, which needs it."""

    epochs: int
    seed: int
    """Shuffle the rows of every epoch; without it they stay in order."""

    use_dynamic_bsz: bool
    max_token_len_per_gpu: int
    micro_batch_size_per_gpu: int
    temperature: float
    update_lr_scheduler: bool
    """Whether the call is a step of the learning-rate schedule; True."""


def choices_of(data: DataProto | StoredBatch) -> tuple[Choices]:
    known = Choices.__annotations__
    return (cast(Choices, {k: v for k, v in data.meta_info.items() if k in known}),)


def as_one_step(data: DataProto | StoredBatch) -> tuple[Choices]:
    (choices,) = choices_of(data)
    return ({**choices, "mini_batch_size": len(data), "epochs": 1},)


class TrainingWorker(RankWorker, CheckpointedWorker):
    """One rank of a model that is trained on batches with a loss function of the caller's."""

    def __init__(
        self, config: TrainingWorkerConfig | DictConfig, *, device: str | None = None
    ) -> None:
        super().__init__()
        self.config = config = omega_conf_to_dataclass(config, TrainingWorkerConfig)
        self.device = device or get_device_name()
        self.loss_fn: LossFn | None = None
        self._engine: BaseEngine | None = None
        self._sequence_group: dist.ProcessGroup | None = None
        self.section = config.engine_config
        if not isinstance(self.section, FSDPEngineConfig | McoreEngineConfig):
            raise ValueError(
                f"engine_config is a {type(self.section).__name__}; FSDPEngineConfig and "
                "McoreEngineConfig are the engines there are"
            )
        self.register_rows(MESH, self.section)

    @property
    def engine(self) -> BaseEngine:
        if self._engine is None:
            raise ValueError("there is no model yet: call reset first")
        return self._engine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        """Load the model and build its optimizer; again: start over from the same weights."""
        config, section = self.config, self.section
        model, optimizer = config.model_config, config.optimizer_config
        if self._engine is None:
            self.init_process_group(timeout_seconds=DEFAULT_TIMEOUT_SECONDS)
            if isinstance(section, FSDPEngineConfig):
                self._sequence_group = self.create_subgroups(ranks_per_sequence(section))
        self._engine = None
        vars(self).pop("checkpoints", None)  # it holds the engine, whose memory is for the new one
        self._engine = EngineRegistry.new(
            EngineSpec(
                model=model,
                engine=cast(Any, section),
                optimizer=cast(Any, optimizer),
                device=self.device,
                model_type=cast(Any, config.model_type),
                backend="megatron" if isinstance(section, McoreEngineConfig) else None,
                max_grad_norm=1.0 if optimizer is None else optimizer.clip_grad,
                gradient_checkpointing=model.enable_gradient_checkpointing,
                activation_offload=model.enable_activation_offload,
                sequence_group=self._sequence_group,
            )
        )
        self.keep_checkpoints(self.engine, config.checkpoint_config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: LossFn) -> None:
        self.loss_fn = loss_fn

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move weights or optimizer state between the device and CPU memory.

        There are no gradients between two steps, so `grad` changes nothing.
        """
        self.engine.to(device, model=model, optimizer=optimizer)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def inference_settings(self, model: str, choices: Choices) -> MicroBatching:
        """How the rows of a pass without gradients are cut."""
        section = self.section
        return self._micro_batching(
            choices,
            section.infer_max_token_len_per_gpu or section.max_token_len_per_gpu,
            section.infer_micro_batch_size_per_gpu or section.micro_batch_size_per_gpu,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_settings(self, choices: Choices) -> UpdateSettings:
        """How the rows of an update are cut into optimizer steps and passes, over all ranks."""
        if "mini_batch_size" not in choices:
            raise ValueError(
                'train_mini_batch needs meta_info["mini_batch_size"], the rows of an optimizer '
                "step over all ranks; train_batch makes one step of all rows"
            )
        section = self.section
        return UpdateSettings(
            rows_per_step=choices["mini_batch_size"],
            epochs=choices.get("epochs", 1),
            shuffle_seed=choices.get("seed"),
            micro_batching=self._micro_batching(
                choices, section.max_token_len_per_gpu, section.micro_batch_size_per_gpu
            ),
        )

    @register(dispatch_mode=dispatch_update(MESH, as_one_step), blocking=False)
    def train_batch(self, data: DataProto | TensorDict) -> DataProto:
        """One optimizer step on all rows; `meta_info["metrics"]` says how it went, over all ranks.

        A worker group lists the values of ranks, which `reduce_metrics` joins.
        """
        data = as_batch(data)
        return self._train(data, *as_one_step(data))

    @register(dispatch_mode=dispatch_update(MESH, choices_of), blocking=False)
    def train_mini_batch(self, data: DataProto | TensorDict) -> DataProto:
        """`epochs` times over the rows, an optimizer step for every `mini_batch_size` of them."""
        data = as_batch(data)
        return self._train(data, *choices_of(data))

    @register(
        dispatch_mode=dispatch_inference(MESH, "model", choices_of),
        columns=INFERENCE_COLUMNS,
        blocking=False,
    )
    def infer_batch(self, data: DataProto | TensorDict) -> DataProto:
        """`log_probs` and `entropy`, or `values`, of the response tokens; 0 where there is none."""
        data = as_batch(data)
        (choices,) = choices_of(data)
        rows = model_rows(data)
        columns = self.engine.infer_batch(
            rows,
            micro_batching=planned_passes(data) or self.inference_settings("model", choices),
            temperature=choices.get("temperature", 1.0),
        )
        mask = rows["response_mask"]
        tensors = {name: column.cpu() * mask for name, column in columns.items()}
        return DataProto.from_dict(tensors={**tensors, **row_column(data)})

    def _micro_batching(
        self, choices: Choices, tokens: int | None, rows: int | None
    ) -> MicroBatching:
        tokens = choices.get("max_token_len_per_gpu", tokens)
        rows = choices.get("micro_batch_size_per_gpu", rows)
        by_tokens = choices.get("use_dynamic_bsz", self.section.use_dynamic_bsz)
        if (tokens if by_tokens else rows) is None:
            option = "max_token_len_per_gpu" if by_tokens else "micro_batch_size_per_gpu"
            raise ValueError(
                f"nothing says how large a micro-batch is: use_dynamic_bsz is {by_tokens} and "
                f"{option} is not set, neither in engine_config nor in the batch's meta_info"
            )
        return MicroBatching.of(
            by_tokens=by_tokens,
            tokens=tokens or 0,
            rows=rows,
            ranks_per_sequence=ranks_per_sequence(cast(Any, self.section)),
        )

    def _train(self, data: DataProto, choices: Choices) -> DataProto:
        if self.loss_fn is None:
            raise ValueError("there is no loss function: call set_loss_fn first")
        rows = model_rows(data)
        plan = update_plan(data)
        if plan is None:
            settings = self.update_settings(choices)
            plan = plan_for_one_rank(
                rows,
                self.engine,
                rows_per_step=settings.rows_per_step,
                epochs=settings.epochs,
                shuffle_seed=settings.shuffle_seed,
                micro_batching=settings.micro_batching,
            )
        temperature = choices.get("temperature", 1.0)
        results = [self._step(rows, step, self.loss_fn, temperature) for step in plan.steps]
        if choices.get("update_lr_scheduler", True):
            self.engine.lr_scheduler_step()
        return DataProto(meta_info={"metrics": joined(results)})

    def _step(
        self, rows: TensorDict, step: StepPlan, loss_fn: LossFn, temperature: float
    ) -> tuple[TrainResult, dict[str, Metric]]:
        engine = self.engine
        group = engine.get_data_parallel_group()

        def loss(columns: Columns, part: TensorDict) -> tuple[Tensor, dict[str, Any]]:
            counted = assign_non_tensor(
                part.copy(),
                dp_size=1,  # gradients of ranks are summed, not averaged
                batch_num_tokens=step.batch_num_tokens,
                global_batch_size=step.global_batch_size,
            )
            value, reported = loss_fn(model_output=columns, data=counted, dp_group=group)
            return value, {**reported, NUM_TOKENS: part["response_mask"].sum()}

        result = engine.train_batch(
            rows,
            loss,
            micro_batching=step.passes[engine.get_data_parallel_rank()],
            temperature=temperature,
        )
        return result, merge_reports(result.metrics, group)


def joined(results: list[tuple[TrainResult, dict[str, Metric]]]) -> dict[str, float]:
    """The metrics of a call: means over its steps, and what the loss function reported."""
    steps = [result for result, _ in results]
    names = sorted({name for _, report in results for name in report})
    return {
        **{
            name: Metric.merge(
                [report[name] for _, report in results if name in report]
            ).aggregate()
            for name in names
        },
        "loss": fmean(step.loss for step in steps),
        "grad_norm": fmean(step.grad_norm for step in steps),
        "lr": steps[-1].learning_rate,
        "num_optimizer_steps": sum(step.is_applied for step in steps),
        "num_skipped_steps": sum(not step.is_applied for step in steps),
    }
