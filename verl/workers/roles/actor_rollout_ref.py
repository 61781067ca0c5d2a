"""The policy's worker: trains it, generates with it, and keeps its frozen reference.

All three share one process so that generation uses the very weights that training writes. Where a
rank holds the whole model, the rollout engine has no weights of its own and there is nothing to
synchronise; where ranks divide it, the engine has a copy that follows every update. Where the
rollout has ranks of its own (`rollout.RolloutWorker`), this worker sends them its weights.
"""

import time
from collections.abc import Sequence
from functools import cached_property

from verl.config.actor import FSDPActorConfig
from verl.config.engine import FSDPEngineConfig
from verl.config.ppo import ActorRolloutRefConfig
from verl.config.ref import FSDPRefConfig
from verl.models.exact import make_exact
from verl.models.lora import as_started, has_lora
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.checkpoint.adapter import checkpoint_manager
from verl.utils.device import get_device_name
from verl.utils.flops_counter import FlopsCounter
from verl.utils.profiler import DistProfiler, DistProfilerExtension
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.actor.gradual_update import GradualUpdate
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.roles.building import build_engine, micro_batching
from verl.workers.roles.checkpointed import CheckpointedWorker
from verl.workers.roles.dealing import (
    INFERENCE_COLUMNS,
    UpdateTerms,
    deals_for_inference,
    deals_for_update,
    planned_passes,
    row_column,
    update_plan,
)
from verl.workers.roles.generating import ROLLOUT_MESH, GeneratingWorker
from verl.workers.roles.rollout_copy import RolloutCopy, load_copy
from verl.workers.roles.utilisation import update_passes, utilisation
from verl.workers.schedule import MicroBatching
from verl.workers.weight_sync import Published, WeightSender, send_weights
from verl.workers.weight_sync.tcp import TcpSender

MESH = "actor"


class ActorRolloutRefWorker(GeneratingWorker, CheckpointedWorker, DistProfilerExtension):
    """Actor, rollout and reference policy of one rank; `role` names which of them it plays."""

    rollout_copy: RolloutCopy | None = None
    gradual_update: GradualUpdate | None = None
    """The update whose rows are coming."""

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        role: str,
        *,
        device: str | None = None,
        total_training_steps: int | None = None,
    ) -> None:
        super().__init__()
        DistProfilerExtension.__init__(self, DistProfiler(self.rank, config.actor.profiler))
        assert isinstance(config.actor, FSDPActorConfig)
        self.config = config
        self.device = device or get_device_name()
        self.is_actor, self.is_ref = "actor" in role, "ref" in role
        self.is_rollout = "rollout" in role
        if total_training_steps is not None:
            config.actor.optim.total_training_steps = total_training_steps
        sharing = self.fsdp_config.ulysses_sequence_parallel_size
        self.take_part_in(MESH, ranks_per_sequence=sharing)
        if self.is_rollout:
            engine_size = config.rollout.tensor_model_parallel_size
            self.take_part_in(ROLLOUT_MESH, ranks_per_sequence=engine_size)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the policy with its rollout engine, and the reference, where the role has them."""
        self.join_ranks(timeout_seconds=self.config.nccl_timeout)
        self.sequence_group = self.neighbours(self.fsdp_config.ulysses_sequence_parallel_size)
        if self.is_actor:
            self._init_actor()
        if self.is_ref:
            self.reference = self._build_reference()

    def _init_actor(self) -> None:
        config, actor = self.config, self.config.actor
        assert isinstance(actor, FSDPActorConfig)
        self.engine = build_engine(
            config.model,
            actor.fsdp_config,
            actor.optim,
            device=self.device,
            max_grad_norm=actor.grad_clip,
            gradient_checkpointing=config.model.enable_gradient_checkpointing,
            activation_offload=config.model.enable_activation_offload,
            probe_micro_batch=actor.probe_micro_batch,
            is_exact=config.rollout.exact,
            keeps_start=self.is_ref,
            sequence_group=self.sequence_group,
        )
        self.flops = FlopsCounter(self.engine.module.config)
        self.tokenizer = hf_tokenizer(
            config.model.tokenizer_path or config.model.path,
            trust_remote_code=config.model.trust_remote_code,
        )
        self.actor = DataParallelPPOActor(actor, self.engine)
        if self.is_rollout:
            self._start_rollout()
        self.checkpoints = checkpoint_manager(
            self.engine.module,
            self.engine,
            processing_class=self.tokenizer,
            checkpoint_config=actor.checkpoint,
            rank=self.rank,
            world_size=self.world_size,
        )

    def _start_rollout(self) -> None:
        """On the trained weights where a rank holds them whole, else on a copy of them, into which
        adapters are merged."""
        config, tp_size = self.config, self.config.rollout.tensor_model_parallel_size
        is_merged = has_lora(self.engine.module) and config.model.lora.merge
        if tp_size == 1 and not isinstance(self.engine, FSDPEngine) and not is_merged:
            if config.rollout.exact:
                capacity = config.rollout.prompt_length + config.rollout.response_length
                make_exact(self.engine.module, capacity)
            self.start_rollout(self.engine.module, lambda: self.engine.policy_version)
            return
        if config.rollout.exact:
            raise ValueError(
                "rollout.exact is True, but the rollout has weights of its own here: generation "
                "and training agree bit for bit on shared weights only. Set fsdp_config.sharding="
                "zero1, rollout.tensor_model_parallel_size=1 and model.lora.merge=False, or "
                "rollout.exact=False"
            )
        module = load_copy(config.model, self.fsdp_config, self.device)
        copy = RolloutCopy(module, bucket_bytes=self.bucket_bytes, is_divided=tp_size > 1)
        self.start_rollout(module, lambda: copy.version, self.neighbours(tp_size))
        self.rollout_copy = copy
        self.update_weights()

    @property
    def fsdp_config(self) -> FSDPEngineConfig:
        assert isinstance(self.config.actor, FSDPActorConfig)
        return self.config.actor.fsdp_config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self) -> None:
        """Let the rollout see the trained weights; `update_actor` and `load_checkpoint` do so."""
        if self.rollout_copy is not None:
            self.rollout_copy.renew(self.rollout, self.engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, addresses: Sequence[tuple[str, int]], token: str) -> Published | None:
        """Send the trained weights to rollout ranks elsewhere, of which each rank serves its share.

        What they hold afterwards; None from a rank that had none to serve.
        """
        weights = self.engine.get_per_tensor_param()
        share = addresses[self.rank :: self.world_size]
        if not share:
            for _ in weights:  # whole tensors may be put together from all ranks
                pass
            return None
        channel = TcpSender(share, token, timeout_seconds=self.config.nccl_timeout)
        try:
            return send_weights(self._sender, weights, self.engine.policy_version, channel)
        finally:
            channel.close()

    @cached_property
    def _sender(self) -> WeightSender:
        return WeightSender(self.bucket_bytes)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Continue from a folder that the caller has verified."""
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
        self.update_weights()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def inference_terms(self, model: str) -> MicroBatching:
        """How the rows of a pass without gradients are cut, for `actor` or `ref`."""
        section = self.config.rollout if model == "actor" else self.config.ref
        return micro_batching(
            by_tokens=section.log_prob_use_dynamic_bsz,
            tokens=section.log_prob_max_token_len_per_gpu,
            rows=section.log_prob_micro_batch_size_per_gpu,
            ranks_per_sequence=self.fsdp_config.ulysses_sequence_parallel_size,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_terms(self) -> UpdateTerms:
        """How the rows of an update are cut into optimizer steps and passes, over all ranks."""
        actor = self.config.actor
        return UpdateTerms(
            rows_per_step=actor.ppo_mini_batch_size * self.config.rollout.n,
            micro_batching=micro_batching(
                by_tokens=actor.use_dynamic_bsz,
                tokens=actor.ppo_max_token_len_per_gpu,
                rows=actor.ppo_micro_batch_size_per_gpu,
                ranks_per_sequence=self.fsdp_config.ulysses_sequence_parallel_size,
            ),
            epochs=actor.ppo_epochs,
            shuffle_seed=actor.data_loader_seed if actor.shuffle else None,
        )

    @register(dispatch_mode=deals_for_inference(MESH, "actor"), columns=INFERENCE_COLUMNS)
    @DistProfiler.annotate(role="actor_compute_log_prob")
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`old_log_probs` and `entropys` of the responses under the current policy.

        With `actor.calculate_sum_pi_squared` also `sum_pi_squared`.
        """
        rollout, start = self.config.rollout, time.perf_counter()
        columns = self.actor.compute_log_prob(
            data.batch,
            micro_batching=planned_passes(data) or self.inference_terms("actor"),
            temperature=rollout.temperature,
        )
        seconds = time.perf_counter() - start
        names = {"log_probs": "old_log_probs", "entropy": "entropys"}
        found = {names.get(name, name): column.cpu() for name, column in columns.items()}
        return DataProto.from_dict(
            tensors={**found, **row_column(data)},
            meta_info={
                "temperature": rollout.temperature,
                "old_policy_version": self.engine.policy_version,
                "metrics": utilisation("actor_infer", self.flops, data, seconds, passes=1 / 3),
            },
        )

    @register(dispatch_mode=deals_for_inference(MESH, "ref"), columns=INFERENCE_COLUMNS)
    @DistProfiler.annotate(role="ref_compute_log_prob")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_log_prob` of the responses under the reference, at the rollout temperature."""
        with as_started(self.reference.module):  # with LoRA it may be the policy itself
            columns = self.reference.infer_batch(
                data.batch,
                micro_batching=planned_passes(data) or self.inference_terms("ref"),
                temperature=self.config.rollout.temperature,
            )
        found = {"ref_log_prob": columns["log_probs"].cpu()}
        return DataProto.from_dict(tensors={**found, **row_column(data)})

    @register(dispatch_mode=deals_for_update(MESH))
    @DistProfiler.annotate(role="actor_update")
    def update_actor(self, data: DataProto) -> DataProto:
        """Train on the batch; the metrics come back in `meta_info["metrics"]`."""
        config, start = self.config, time.perf_counter()
        metrics = self.actor.update_policy(
            data.batch.to(self.engine.device),
            rows_per_step=self.update_terms().rows_per_step,
            temperature=config.rollout.temperature,
            old_policy_version=data.meta_info.get("old_policy_version"),
            plan=update_plan(data),
        )
        self.update_weights()
        seconds = time.perf_counter() - start
        passes = update_passes(config.actor.ppo_epochs, self.engine.module)
        metrics.update(utilisation("actor", self.flops, data, seconds, passes=passes))
        return DataProto(meta_info={"metrics": metrics})

    # ---- an update whose rows come while others are generated ------------------------------------

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def begin_update(self, num_rows: int) -> None:
        """Open an optimizer step on at most `num_rows` rows; one left open before is forgotten."""
        rollout = self.config.rollout
        self.gradual_update = GradualUpdate(
            self.actor,
            num_rows=num_rows,
            num_columns=rollout.response_length,
            temperature=rollout.temperature,
        )

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def add_to_update(self, data: DataProto) -> int:
        """Take rows of the current policy; how many rows have been run through the model so far."""
        assert self.gradual_update is not None, "begin_update comes first"
        self.gradual_update.add(data.batch)
        return self.gradual_update.num_rows_run

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def finish_update(self) -> DataProto:
        """Run what is left and make the step; metrics as from `update_actor`, without `perf/mfu`,
        as the passes shared the device with generation."""
        assert self.gradual_update is not None, "begin_update comes first"
        metrics = self.gradual_update.finish()
        self.gradual_update = None
        self.update_weights()
        return DataProto(meta_info={"metrics": metrics})

    def _build_reference(self) -> OneDeviceEngine:
        """The policy itself where its adapters can be taken off, else a frozen model beside it."""
        config = self.config
        if self.is_actor and has_lora(self.engine.module) and config.ref.model.path is None:
            return self.engine
        assert isinstance(config.ref, FSDPRefConfig)
        return build_engine(
            config.model,
            config.ref.fsdp_config,
            None,
            device=self.device,
            path=config.ref.model.path,
            is_exact=config.rollout.exact,
            sequence_group=self.sequence_group,
        )
