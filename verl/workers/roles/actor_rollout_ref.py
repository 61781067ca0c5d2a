"""The policy's worker: trains it, generates with it, and keeps its frozen reference.

All three share one process so that generation uses the very weights that training writes. Where a
rank holds the whole model, the rollout engine has no weights of its own and there is nothing to
synchronise; where ranks divide it, or the engine runs in a process of its own, the engine has a
copy that follows every update. Where the rollout has ranks of its own (`rollout.RolloutWorker`),
this worker sends them its weights.
"""

import logging
import time
from collections.abc import Sequence
from functools import cached_property

from torch import Tensor
from transformers import PreTrainedModel

from verl.config.actor import FSDPActorConfig
from verl.config.ppo import ActorRolloutRefConfig
from verl.config.ref import FSDPRefConfig
from verl.models.exact import make_exact
from verl.models.lora import as_started, has_lora
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.checkpoint.fsdp_checkpoint_manager import checkpoint_manager
from verl.utils.device import get_device_name
from verl.utils.flops_counter import FlopsCounter
from verl.utils.profiler import DistProfiler, DistProfilerExtension
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.engine import BaseEngine, EngineRegistry, EngineSpec
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
from verl.workers.roles.engine_check import EngineCheck, EngineTerms
from verl.workers.roles.generating import ROLLOUT_MESH, GeneratingWorker
from verl.workers.roles.process_copy import ProcessCopy, use_up
from verl.workers.roles.utilisation import update_passes, utilisation
from verl.workers.rollout.factory import adapter_engines, has_own_process, ranks_per_engine
from verl.workers.rollout.trained import Answer, log_probs_of, scrambled
from verl.workers.schedule import MicroBatching
from verl.workers.weight_sync import Published, WeightSender, send_weights
from verl.workers.weight_sync.sender import NamedTensors
from verl.workers.weight_sync.tcp import TcpSender

MESH = "actor"

logger = logging.getLogger(__name__)


class ActorRolloutRefWorker(GeneratingWorker, CheckpointedWorker, DistProfilerExtension):
    """Actor, rollout and reference policy of one rank; `role` names which of them it plays."""

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
            size = ranks_per_engine(config.rollout)
            self.take_part_in(ROLLOUT_MESH, ranks_per_sequence=size)

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
        self.engine = EngineRegistry.new(
            EngineSpec(
                model=config.model,
                engine=actor.fsdp_config,
                optimizer=actor.optim,
                device=self.device,
                max_grad_norm=actor.grad_clip,
                gradient_checkpointing=config.model.enable_gradient_checkpointing,
                activation_offload=config.model.enable_activation_offload,
                probe_micro_batch=actor.probe_micro_batch,
                is_exact=config.rollout.exact,
                keeps_start=self.is_ref,
                is_shared=self.is_rollout and not has_own_process(config.rollout.name),
                sequence_group=self.sequence_group,
            )
        )
        self.flops = FlopsCounter(self.engine.module.config)
        self.load_tokenizer()
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
        rollout = self.config.rollout
        if self._shares_weights():
            if rollout.exact:
                make_exact(self.engine.module, rollout.prompt_length + rollout.response_length)
            self.start_on_module(self.engine.module, lambda: self.engine.policy_version)
            return
        if rollout.exact:
            raise ValueError(
                "rollout.exact is True, but the rollout has weights of its own here: generation "
                "and training agree bit for bit on shared weights only. Set fsdp_config.sharding="
                "zero1, rollout.tensor_model_parallel_size=1 and model.lora.merge=False, or "
                "rollout.exact=False"
            )
        self.start_on_copy()
        does_probe = rollout.probe and self.module_with_adapter() is None
        if self._check is not None and does_probe:
            self._check.probe()  # leaves the trained weights in the engine
        self.update_weights()

    @cached_property
    def _check(self) -> EngineCheck | None:
        """Of an engine that computes with code of its own."""
        if not isinstance(self.rollout_copy, ProcessCopy):
            return None
        if self.sequence_group is not None:
            logger.warning(
                "ranks divide sequences (ulysses_sequence_parallel_size) and cannot each score the "
                "answers of an engine of theirs: the rollout engine is neither probed nor watched"
            )
            return None
        terms = self.engine_terms()
        return EngineCheck(self.config.rollout, self.engine, self.rollout_copy, terms)

    def module_with_adapter(self) -> PreTrainedModel | None:
        config, module = self.config, self.engine.module
        takes_adapters = config.rollout.name in adapter_engines
        is_sent_alone = takes_adapters and has_lora(module) and not config.model.lora.merge
        return module if is_sent_alone else None

    def _shares_weights(self) -> bool:
        """Whether the engine generates with the very weights that are trained."""
        config, is_divided = self.config, self.engine.is_sharded
        is_merged = has_lora(self.engine.module) and config.model.lora.merge
        is_alone = config.rollout.tensor_model_parallel_size == 1 and not is_divided
        return is_alone and not is_merged and not has_own_process(config.rollout.name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self) -> None:
        """Let the rollout see the trained weights; `update_actor` and `load_checkpoint` do so."""
        self._follow_update()

    def _follow_update(self) -> dict[str, float]:
        """The same, and what there is to report of it."""
        if self.rollout_copy is None:
            return {}
        self.rollout_copy.renew(self.engine)
        return {} if self._check is None else self._check.after_update()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(
        self, addresses: Sequence[tuple[str, int]], token: str, is_scrambled: bool = False
    ) -> Published | None:
        """Send the trained weights to rollout ranks elsewhere, of which each rank serves its share.

        What they hold afterwards; None from a rank that had none to serve. A probe asks for
        scrambled ones.
        """
        weights = self.engine.get_per_tensor_param()
        if is_scrambled:
            weights = ((name, scrambled(name, weight)) for name, weight in weights)
        share = addresses[self.rank :: self.world_size]
        try:
            return self._send_to(share, token, weights) if share else None
        finally:
            use_up(weights)

    def _send_to(
        self, addresses: Sequence[tuple[str, int]], token: str, weights: NamedTensors
    ) -> Published:
        channel = TcpSender(addresses, token, timeout_seconds=self.config.nccl_timeout)
        try:
            return send_weights(self._sender, weights, self.engine.policy_version, channel)
        finally:
            channel.close()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def engine_terms(self) -> EngineTerms:
        """What a rollout engine is compared by with this policy."""
        dtype, device = self.trained_dtype, self.device
        return EngineTerms.of(self.config, self.engine.module, dtype=dtype, device=device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def trained_version(self) -> int:
        """How many updates the trained weights have seen."""
        return self.engine.policy_version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def score_answers(self, answers: Sequence[Answer], temperature: float) -> list[Tensor]:
        """What training gives for the tokens of answers by an engine elsewhere."""
        return log_probs_of(self.engine, answers, temperature=temperature)

    @cached_property
    def _sender(self) -> WeightSender:
        return WeightSender(self.bucket_bytes)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Continue from a folder that the caller has verified."""
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
        if self.rollout_copy is not None:
            self.rollout_copy.withdraw()  # other weights may have the same number
        self.update_weights()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def inference_terms(self, model: str) -> MicroBatching:
        """How the rows of a pass without gradients are cut, for `actor` or `ref`."""
        section = self.config.rollout if model == "actor" else self.config.ref
        return MicroBatching.of(
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
            micro_batching=MicroBatching.of(
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
            data.batch,
            rows_per_step=self.update_terms().rows_per_step,
            temperature=config.rollout.temperature,
            old_policy_version=data.meta_info.get("old_policy_version"),
            plan=update_plan(data),
        )
        metrics.update(self._follow_update())
        seconds = time.perf_counter() - start
        passes = update_passes(config.actor.ppo_epochs, self.engine.module)
        metrics.update(utilisation("actor", self.flops, data, seconds, passes=passes))
        return DataProto(meta_info={"metrics": metrics})

    def _build_reference(self) -> BaseEngine:
        """The policy itself where its adapters can be taken off, else a frozen model beside it."""
        config = self.config
        if self.is_actor and has_lora(self.engine.module) and config.ref.model.path is None:
            return self.engine
        assert isinstance(config.ref, FSDPRefConfig)
        return EngineRegistry.new(
            EngineSpec(
                model=config.model,
                engine=config.ref.fsdp_config,
                optimizer=None,
                device=self.device,
                path=config.ref.model.path,
                is_exact=config.rollout.exact,
                sequence_group=self.sequence_group,
            )
        )
