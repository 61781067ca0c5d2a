"""Training with megatron-core: this rank's part of a model that Megatron's layout divides.

`chunks` are megatron-core's modules with this rank's weights. `module` is the Hugging Face model
without weights: what roles ask it for, above all its configuration. Rows, losses, micro-batches and
the optimizer's arithmetic are those of the other engines, so a step is the same step.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.config.critic import McoreCriticModelConfig
from verl.config.engine import McoreEngineConfig
from verl.config.model import BaseModelConfig, HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig, McoreOptimizerConfig
from verl.models.head import OutputHead
from verl.models.lora import lora_options
from verl.utils.checkpoint.fsdp_checkpoint_manager import DividedModel
from verl.utils.checkpoint.hf_model import own_weights
from verl.utils.checkpoint.pieces import Part
from verl.utils.distributed import all_reduce_, is_distributed
from verl.workers.engine.base import Columns, LossFunction, TrainResult
from verl.workers.engine.forward import rows_on_device, take_rows
from verl.workers.engine.megatron.balance import Balance, row_weights
from verl.workers.engine.megatron.cpu import on_this_device, without_random_state
from verl.workers.engine.megatron.forward import (
    PackedPass,
    column_shapes,
    columns_of,
    from_last_stage,
    hidden_states,
    run_pipeline,
)
from verl.workers.engine.megatron.groups import join_layout
from verl.workers.engine.megatron.layout import Layout, check_layout, num_experts
from verl.workers.engine.megatron.model import ModelChunk, build_chunks
from verl.workers.engine.megatron.optimizer import ParallelOptimizer
from verl.workers.engine.megatron.state import (
    StateOfLayout,
    load_dist_checkpoint,
    load_shares,
    shares,
)
from verl.workers.engine.megatron.weights import (
    EXPERT_BIAS,
    export_weights,
    load_weights,
    trained_names,
)
from verl.workers.engine.optimizer import MasterOptimizer
from verl.workers.engine.outputs import LOG_PROBS, Outputs
from verl.workers.engine.routes import AUX_LOSS
from verl.workers.engine.sharding import broadcast_from_first, world_group
from verl.workers.engine.spec import EngineSpec
from verl.workers.engine.stepping import PassRequest, Report, SteppingEngine
from verl.workers.schedule import MicroBatching, Passes


class MegatronEngine(SteppingEngine, DividedModel):
    """One of the ranks of a layout."""

    has_collectives_in_forward = True
    is_sharded = True

    def __init__(
        self,
        build_model: Callable[[], PreTrainedModel],
        optimizer_config: McoreOptimizerConfig | FSDPOptimizerConfig | None = None,
        *,
        build_skeleton: Callable[[], PreTrainedModel],
        config: McoreEngineConfig,
        compute_dtype: torch.dtype,
        device: torch.device | str,
        freezes_routers: bool = False,
        **options: Any,
    ) -> None:
        """`build_model` loads the weights into CPU memory; only the first rank calls it.

        `build_skeleton` makes the same model on the meta device, without weights. With
        `freezes_routers` those of a model with experts are not trained.
        """
        super().__init__(build_model, optimizer_config, **options)  # pyright: ignore[reportArgumentType]
        self._build_skeleton = build_skeleton
        self._config = config
        self._compute_dtype = compute_dtype
        self._compute_device = torch.device(device)
        self._freezes_routers = freezes_routers
        self._loss_function: LossFunction | None = None
        """Of the training step that runs."""

        self.layout = Layout.of(config, dist.get_world_size() if is_distributed() else 1)

    @classmethod
    def from_spec(cls, spec: EngineSpec) -> "MegatronEngine":
        config: Any = spec.engine
        assert isinstance(config, McoreEngineConfig)
        refuse_model_options(spec.model)
        return cls(
            partial(spec.load_module, spec.dtype, "cpu"),
            spec.optimizer,
            build_skeleton=partial(spec.load_module, spec.dtype, "meta"),
            config=config,
            compute_dtype=spec.dtype,
            device=spec.device,
            freezes_routers=freezes_routers(spec.model),
            memory=spec.memory(whole_weights=True),
            **spec.options(),
        )

    # ---- building --------------------------------------------------------------------------------

    def initialize(self) -> None:
        with on_this_device():
            super().initialize()
        if self.routes is None:
            return
        self.routes.can_replay = False
        modules = self.chunks[0].config.recompute_modules or []
        if self.routes.aux_loss_coef and self.layout.pipeline > 1 and "moe" in modules:
            raise ValueError(
                "override_transformer_config.recompute_modules has moe, and "
                "override_config.router_aux_loss_coef is set: where pipeline stages interleave "
                "micro-batches, a router that is computed again alone does not know which one it "
                "is in. Leave moe out, or use recompute_granularity=full"
            )

    def load_module(self) -> PreTrainedModel:
        assert self._compute_device is not None
        config, skeleton = self._config, self._build_skeleton()
        embedding = skeleton.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding)
        self._padding_id = embedding.padding_idx
        check_layout(self.layout, config, skeleton.config)
        ranks = join_layout(self.layout, self._compute_device)
        self.ranks, self.sequence_group = ranks, ranks.sequence
        without_random_state()
        chunks = build_chunks(
            skeleton.config,
            with_recomputation(config) if self._gradient_checkpointing else config,
            self.layout,
            self._compute_dtype,
            is_value_model=self._is_value_model,
        )
        self.chunks = [chunk.to(self._compute_device) for chunk in chunks]
        for chunk in self.chunks:
            chunk.config.calculate_per_token_loss = True  # losses are divided by counts already
            if self.layout.virtual_pipeline is not None:
                # One exchange at a time: between two stages, two would be mixed up.
                chunk.config.overlap_p2p_comm, chunk.config.batch_p2p_comm = True, False
        if self._freezes_routers:
            freeze_routers(self.chunks, skeleton.config)
        if self._config.use_dist_checkpointing:
            self._load_dist_checkpoint(skeleton.config)
        else:
            load_weights(self.chunks, skeleton.config, self._weights_of_first_rank(skeleton))
        return skeleton

    def _load_dist_checkpoint(self, hf_config: Any) -> None:
        assert self._config.dist_checkpointing_path is not None, "its section has refused that"
        if any(name.endswith(EXPERT_BIAS) for name in self.chunks[0].whole_shapes):
            raise ValueError(
                f"megatron.use_dist_checkpointing is True, but routers of {hf_config.model_type} "
                f"have an {EXPERT_BIAS}, which is not trained and so not sent to rollout engines: "
                "they would keep that of model.path. Merge the checkpoint first (python -m "
                "verl.model_merger merge --backend megatron), and set model.path to the result"
            )
        load_dist_checkpoint(
            self.chunks,
            Path(self._config.dist_checkpointing_path).expanduser(),
            prefix=self._config.dist_checkpointing_prefix,
            vocabulary=hf_config.get_text_config().vocab_size,
            is_fresh_critic=self._is_value_model and self._optimizer_config is not None,
        )

    def _weights_of_first_rank(self, skeleton: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
        """One whole tensor at a time, in every memory but the first rank's."""
        source = own_weights(self._build_model()) if not is_later_rank() else {}
        for name, like in own_weights(skeleton).items():
            yield name, broadcast_from_first(source.get(name), like, world_group())

    def trained_part(self) -> nn.Module:
        return nn.ModuleList(self.chunks)

    def enable_checkpointing(self) -> None:
        """The chunks were built with it."""

    def build_optimizer(self, config: FSDPOptimizerConfig) -> MasterOptimizer:
        return ParallelOptimizer(
            self.chunks,
            config,
            is_sliced=self._config.use_distributed_optimizer,
            offload=self.memory.optimizer_offload,
        )

    # ---- passes ----------------------------------------------------------------------------------

    def infer_batch(
        self,
        data: TensorDict,
        *,
        micro_batching: MicroBatching | Passes,
        temperature: float = 1.0,
        outputs: Outputs = LOG_PROBS,
    ) -> Columns:
        refuse_outputs(outputs)
        with on_this_device():
            return super().infer_batch(
                data, micro_batching=micro_batching, temperature=temperature, outputs=outputs
            )

    def train_batch(
        self,
        data: TensorDict,
        loss_function: LossFunction,
        *,
        micro_batching: MicroBatching | Passes,
        temperature: float = 1.0,
        outputs: Outputs = LOG_PROBS,
    ) -> TrainResult:
        refuse_outputs(outputs)
        with on_this_device():
            return super().train_batch(
                data,
                loss_function,
                micro_batching=micro_batching,
                temperature=temperature,
                outputs=outputs,
            )

    def schedule(
        self, data: TensorDict, lengths: list[int], micro_batching: MicroBatching | Passes
    ) -> Passes:
        """Those of a plan, or a cut of its own, made equally many: ranks meet in every pass."""
        passes = super().schedule(data, lengths, micro_batching)
        if isinstance(micro_batching, MicroBatching):
            passes = [
                *passes,
                *([] for _ in range(self._most_on_a_rank(len(passes)) - len(passes))),
            ]
        if self.layout.virtual_pipeline is None:
            return passes
        return [*passes, *([] for _ in range(-len(passes) % self.layout.pipeline))]

    def _most_on_a_rank(self, number: int) -> int:
        """The largest of the numbers that the data ranks have."""
        if self.layout.data == 1:
            return number
        most = torch.tensor(number)
        return int(all_reduce_(most, op=dist.ReduceOp.MAX, group=self.get_data_parallel_group()))

    def forward(
        self, rows: TensorDict, temperature: float, outputs: Outputs = LOG_PROBS
    ) -> Columns:
        (chunk,) = self.chunks
        packed = self._packed(rows, outputs)
        hidden = hidden_states(chunk, packed, self._padding_id)
        columns = self._columns(chunk, packed, rows, hidden, temperature, outputs)
        return columns | self._balance_columns([packed.rows.balance])[0]

    def _packed(self, rows: TensorDict, outputs: Outputs) -> PackedPass:
        """The tokens of a micro-batch; in training with what routers need to know of it."""
        packed = PackedPass.of(rows, self.device)
        if self._loss_function is None or self.routes is None:
            return packed
        weights, scale = None, self.require_optimizer().loss_scale
        if self.routes.aux_loss_coef:
            blank = column_shapes(rows, outputs, is_value_model=False)
            weights = row_weights(self._loss_function, rows, blank, self.device)
            weights = weights if scale is None else weights * scale.value
        group: Any = parallel_state.get_tensor_model_parallel_group()
        packed.rows.balance = Balance.of(self.routes.routing, packed.inputs, weights, group)
        return packed

    def _balance_columns(self, passes: Sequence[Balance | None]) -> list[Columns]:
        """The column of auxiliary losses of each micro-batch; experts are counted."""
        columns = list[Columns]()
        stages: Any = parallel_state.get_pipeline_model_parallel_group()
        for balance in passes:
            columns.append({})
            if balance is None or self.routes is None:
                continue
            losses, load = balance.total(stages)
            self.routes.load.add_counts(load, self.routes.routing)
            if self.routes.aux_loss_coef:
                columns[-1][AUX_LOSS] = losses
        return columns

    def _columns(
        self,
        chunk: Any,
        packed: PackedPass,
        rows: TensorDict,
        hidden: Tensor,
        temperature: float,
        outputs: Outputs,
    ) -> Columns:
        return columns_of(
            chunk,
            hidden,
            packed,
            rows,
            temperature=temperature,
            is_value_model=self._is_value_model,
            outputs=outputs,
            vocabulary=self.module.config.get_text_config().vocab_size,
        )

    def infer_passes(
        self, request: PassRequest, schedule: Passes
    ) -> Iterator[tuple[list[int], Columns]]:
        if self.layout.pipeline == 1:
            yield from super().infer_passes(request, schedule)
            return

        def stage(chunk: Any, rows: TensorDict) -> Tensor:
            return self._stage(chunk, PackedPass.of(rows, self.device))

        def end(chunk: Any, rows: TensorDict, hidden: Tensor) -> tuple[Tensor, Columns]:
            packed = PackedPass.of(rows, self.device)
            columns = self._columns(
                chunk, packed, rows, hidden, request.temperature, request.outputs
            )
            return hidden, columns

        micro_batches = [take_rows(request.data, rows) for rows in schedule]
        found = run_pipeline(self.chunks, self.layout, micro_batches, stage, end, forward_only=True)
        for number, (rows, micro_batch) in enumerate(zip(schedule, micro_batches, strict=True)):
            yield rows, self._from_last(found, number, micro_batch, request.outputs)

    def train_passes(
        self, request: PassRequest, schedule: Passes, loss_function: LossFunction
    ) -> list[Report]:
        self._loss_function = loss_function
        try:
            if self.layout.pipeline == 1:
                return super().train_passes(request, schedule, loss_function)
            return self._train_pipeline(request, schedule, loss_function)
        finally:
            self._loss_function = None

    def _train_pipeline(
        self, request: PassRequest, schedule: Passes, loss_function: LossFunction
    ) -> list[Report]:
        scale = self.require_optimizer().loss_scale
        balances: dict[int, Balance | None] = {}  # of micro-batches, which virtual stages share

        def stage(chunk: Any, rows: TensorDict) -> Tensor:
            packed = self._packed(rows, request.outputs)
            packed.rows.balance = balances.setdefault(id(rows), packed.rows.balance)
            return self._stage(chunk, packed)

        def end(chunk: Any, rows: TensorDict, hidden: Tensor) -> tuple[Tensor, Any]:
            packed = PackedPass.of(rows, self.device)
            columns = self._columns(
                chunk, packed, rows, hidden, request.temperature, request.outputs
            )
            if self.routes is not None and self.routes.aux_loss_coef:
                columns[AUX_LOSS] = hidden.new_zeros(len(rows))  # routers add its gradient
            loss, _ = loss_function(columns, rows_on_device(rows, self.device))
            kept = {name: column.detach() for name, column in columns.items()}
            return loss if scale is None else loss * scale.value, kept

        micro_batches = [take_rows(request.data, rows) for rows in schedule]
        found = run_pipeline(
            self.chunks, self.layout, micro_batches, stage, end, forward_only=False
        )
        further = self._balance_columns([balances[id(rows)] for rows in micro_batches])
        reports = []
        with torch.no_grad():
            for number, rows in enumerate(micro_batches):
                columns = self._from_last(found, number, rows, request.outputs)
                columns |= further[number]
                reports.append(loss_function(columns, rows_on_device(rows, self.device)))
        return reports

    def _stage(self, chunk: Any, packed: PackedPass) -> Tensor:
        self._gradient_sums.count(1)
        with self.residency.during_forward():
            return hidden_states(chunk, packed, self._padding_id)

    def _from_last(
        self, found: list[Columns], number: int, rows: TensorDict, outputs: Outputs
    ) -> Columns:
        blank = column_shapes(rows, outputs, is_value_model=self._is_value_model)
        return from_last_stage(found[number] if found else None, blank, self.device)

    def response_states(self, rows: TensorDict) -> Tensor:
        raise ValueError(f"hidden states of a teacher {NOT_A_TEACHER}")

    def output_head(self) -> OutputHead:
        raise ValueError(f"the output layer of a teacher {NOT_A_TEACHER}")

    # ---- weights and state -----------------------------------------------------------------------

    @torch.no_grad()
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters in the dtype they compute in, one at a time; every rank must take
        part."""
        with self.residency.in_use():
            yield from export_weights(
                self.chunks, self.module.config, trained_names(self.chunks[0].whole_shapes)
            )

    @torch.no_grad()
    def weight_parts(self) -> dict[str, Part]:
        with self.residency.in_use():
            return dict(shares(export_weights(self.chunks, self.module.config)))

    def load_weight_parts(self, parts: Mapping[str, Part]) -> None:
        with self.residency.in_use():
            load_shares(self.chunks, self.module.config, parts, self.device)

    def state_dict(self) -> dict[str, Any]:
        optimizer = self.require_optimizer()
        with self.residency.in_use(), optimizer.state_on_device():
            state = self._state().save()
        if optimizer.loss_scale is not None:
            state["loss_scale"] = optimizer.loss_scale.state_dict()
        return {"policy_version": self.policy_version, "optimizer": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        optimizer, stored = self.require_optimizer(), state["optimizer"]
        with self.residency.in_use(), optimizer.state_on_device():
            self._state().load(stored)
        if optimizer.loss_scale is not None and "loss_scale" in stored:
            optimizer.loss_scale.load_state_dict(stored["loss_scale"])
        self.policy_version = int(state["policy_version"])

    def _state(self) -> StateOfLayout:
        optimizer = self.require_optimizer()
        assert isinstance(optimizer, ParallelOptimizer)
        names = trained_names(self.chunks[0].whole_shapes, with_routers=not self._freezes_routers)
        return StateOfLayout(self.chunks, self.module.config, optimizer, names)

    # ---- ranks -----------------------------------------------------------------------------------

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self.layout.leads(dist.get_rank())


NOT_A_TEACHER = (
    "is asked for, but a model with strategy=megatron is divided among ranks; use strategy=fsdp "
    "for models that teach or are taught over the whole vocabulary"
)


def refuse_model_options(model: BaseModelConfig | HFModelConfig) -> None:
    has_adapter = lora_options(model) is not None
    if isinstance(model, McoreCriticModelConfig):
        has_adapter = model.lora.rank > 0
    if has_adapter:
        raise ValueError(
            "LoRA is asked for (model.lora.rank, model.lora_rank or model.lora_adapter_path), but "
            "strategy=megatron trains all weights; set the rank to 0, or use strategy=fsdp"
        )


def freezes_routers(model: BaseModelConfig | HFModelConfig) -> bool:
    return bool((model.override_config.get("moe_config") or {}).get("freeze_moe_router"))


def freeze_routers(chunks: list[ModelChunk], hf_config: Any) -> None:
    if num_experts(hf_config.get_text_config()) is None:
        raise ValueError(
            "model.override_config.moe_config.freeze_moe_router is True, but "
            f"{hf_config.model_type} has no experts: leave it out"
        )
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".mlp.router." in name:
                parameter.requires_grad_(False)


def refuse_outputs(outputs: Outputs) -> None:
    if outputs.states or outputs.to_teachers is not None:
        raise ValueError(f"a divergence over the whole vocabulary {NOT_A_TEACHER}")


def is_later_rank() -> bool:
    return dist.get_rank() > 0


def with_recomputation(config: McoreEngineConfig) -> McoreEngineConfig:
    """Every layer computed again in the backward pass, unless the overrides say what is."""
    overrides = config.override_transformer_config
    if overrides.get("recompute_granularity"):
        return config
    whole = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    return dataclasses.replace(config, override_transformer_config={**overrides, **whole})
