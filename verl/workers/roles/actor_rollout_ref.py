"""The policy's worker: trains it, generates with it, and keeps its frozen reference.

All three share one process so that generation uses the very weights that training writes. On one
device the built-in rollout engine holds no weights of its own; there is nothing to synchronise.
"""

import time
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.config.actor import FSDPActorConfig
from verl.config.ppo import ActorRolloutRefConfig
from verl.config.ref import FSDPRefConfig
from verl.models.exact import make_exact
from verl.protocol import DataProto
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.utils.checkpoint.one_device import OneDeviceCheckpointManager
from verl.utils.flops_counter import FlopsCounter
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.roles.building import build_engine, micro_batching
from verl.workers.roles.checkpointed import CheckpointedWorker
from verl.workers.roles.utilisation import utilisation
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine
from verl.workers.rollout.native.memory import cache_budget

MESH = "actor"
STEPS_PER_VISIT, STEPS_PER_VISIT_ON_CPU = 16, 4
"""Tokens per sequence between two looks of the host; a device beside it waits meanwhile."""


class ActorRolloutRefWorker(CheckpointedWorker):
    """Actor, rollout and reference policy of one rank; `role` names which of them it plays."""

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        role: str,
        *,
        device: str = "cpu",
        total_training_steps: int = -1,
    ) -> None:
        super().__init__()
        assert isinstance(config.actor, FSDPActorConfig)
        self.config = config
        self.device = device
        self.is_ref = "ref" in role
        self.total_training_steps = total_training_steps
        self._register_dispatch_collect_info(MESH, dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the policy, the reference if there is one, and the rollout engine."""
        config, actor = self.config, self.config.actor
        assert isinstance(actor, FSDPActorConfig)
        actor.optim.total_training_steps = self.total_training_steps
        self.engine = build_engine(
            config.model,
            actor.fsdp_config,
            actor.optim,
            device=self.device,
            max_grad_norm=actor.grad_clip,
            gradient_checkpointing=config.model.enable_gradient_checkpointing,
        )
        if config.rollout.exact:
            capacity = config.rollout.prompt_length + config.rollout.response_length
            make_exact(self.engine.module, capacity)
        self.flops = FlopsCounter(self.engine.module.config)
        self.tokenizer = hf_tokenizer(
            config.model.tokenizer_path or config.model.path,
            trust_remote_code=config.model.trust_remote_code,
        )
        self.actor = DataParallelPPOActor(actor, self.engine)
        self.rollout = self._build_rollout()
        self.checkpoints = OneDeviceCheckpointManager(
            self.engine.module,
            self.engine,
            processing_class=self.tokenizer,
            checkpoint_config=actor.checkpoint,
        )
        if self.is_ref:
            assert isinstance(config.ref, FSDPRefConfig)
            self.reference = build_engine(
                config.model,
                config.ref.fsdp_config,
                None,
                device=self.device,
                path=config.ref.model.path,
            )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=MESH))
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`old_log_probs` and `entropys` of the responses under the current policy.

        With `actor.calculate_sum_pi_squared` also `sum_pi_squared`.
        """
        rollout, start = self.config.rollout, time.perf_counter()
        columns = self.actor.compute_log_prob(
            data.batch,
            micro_batching=micro_batching(
                by_tokens=rollout.log_prob_use_dynamic_bsz,
                tokens=rollout.log_prob_max_token_len_per_gpu,
                rows=rollout.log_prob_micro_batch_size_per_gpu,
            ),
            temperature=rollout.temperature,
        )
        seconds = time.perf_counter() - start
        names = {"log_probs": "old_log_probs", "entropy": "entropys"}
        return DataProto.from_dict(
            tensors={names.get(name, name): column.cpu() for name, column in columns.items()},
            meta_info={
                "temperature": rollout.temperature,
                "old_policy_version": self.engine.policy_version,
                "metrics": utilisation("actor_infer", self.flops, data, seconds, passes=1 / 3),
            },
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=MESH))
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_log_prob` of the responses under the reference, at the rollout temperature."""
        ref = self.config.ref
        columns = self.reference.infer_batch(
            data.batch,
            micro_batching=micro_batching(
                by_tokens=ref.log_prob_use_dynamic_bsz,
                tokens=ref.log_prob_max_token_len_per_gpu,
                rows=ref.log_prob_micro_batch_size_per_gpu,
            ),
            temperature=self.config.rollout.temperature,
        )
        return DataProto.from_dict(tensors={"ref_log_prob": columns["log_probs"].cpu()})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=MESH))
    def update_actor(self, data: DataProto) -> DataProto:
        """Train on the batch; the metrics come back in `meta_info["metrics"]`."""
        config, start = self.config, time.perf_counter()
        metrics = self.actor.update_policy(
            data.batch.to(self.engine.device),
            rows_per_step=config.actor.ppo_mini_batch_size * config.rollout.n // self.world_size,
            temperature=config.rollout.temperature,
            old_policy_version=data.meta_info.get("old_policy_version"),
        )
        seconds, epochs = time.perf_counter() - start, config.actor.ppo_epochs
        metrics.update(utilisation("actor", self.flops, data, seconds, passes=epochs))
        return DataProto(meta_info={"metrics": metrics})

    def _build_rollout(self) -> NativeEngine:
        rollout, tokenizer = self.config.rollout, self.tokenizer
        if rollout.name != "native":
            raise ValueError(
                f"rollout.name is {rollout.name!r}; this worker runs the built-in engine: "
                "set actor_rollout_ref.rollout.name=native"
            )
        is_cpu = self.engine.device.type == "cpu"
        return NativeEngine(
            self.engine.module,
            EngineLimits(
                max_num_seqs=rollout.max_num_seqs,
                max_prompt_tokens=rollout.prompt_length,
                max_response_tokens=rollout.response_length,
                max_prefill_tokens=rollout.max_num_batched_tokens,
                max_cache_bytes=cache_budget(self.engine.device, rollout.gpu_memory_utilization),
                steps_per_visit=STEPS_PER_VISIT_ON_CPU if is_cpu else STEPS_PER_VISIT,
            ),
            eos_token_ids=end_tokens(self.engine.module, tokenizer),
            version=lambda: self.engine.policy_version,
            decode_text=lambda ids: str(tokenizer.decode(ids)),
        )


def end_tokens(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a response: the model's, its generation config's, the tokenizer's."""
    ids: set[int] = set()
    stated: list[Any] = [tokenizer.eos_token_id, module.config.get_text_config().eos_token_id]
    if module.generation_config is not None:
        stated.append(module.generation_config.eos_token_id)
    for value in stated:
        if value is not None:
            ids.update([value] if isinstance(value, int) else value)
    return sorted(ids)
