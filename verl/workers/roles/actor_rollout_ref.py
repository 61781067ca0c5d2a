"""The policy's workers: they register methods and delegate to `Policy`, `Generator`, `Reference`.

`ActorRolloutRefWorker` has all three in one process, so that generation uses the very weights that
training writes. Where a rank holds the whole model, the rollout engine has no weights of its own
and there is nothing to publish; where ranks shard it, or the engine runs in a process of its own,
`update_weights` brings the engine's to the trained version, after every update. `RolloutWorker` is
a generator on ranks of its own, to which the actor's ranks send (`verl.workers.rollout.publish`).
"""

import logging
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.config.convert import omega_conf_to_dataclass
from verl.config.distillation import DistillationConfig
from verl.config.engine import FSDPEngineConfig, McoreEngineConfig
from verl.config.ppo import ActorRolloutRefConfig
from verl.data_plane.batch import tqbridge
from verl.models.lora import has_lora
from verl.protocol import DataProto
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.utils.device import get_device_name
from verl.utils.flops_counter import FlopsCounter
from verl.utils.fs import copy_to_local
from verl.utils.profiler import DistProfiler, DistProfilerExtension
from verl.utils.tokenizer import WithProcessorFiles
from verl.workers.actor.dp_actor import Policy, Reference
from verl.workers.engine import BaseEngine, EngineRegistry, EngineSpec
from verl.workers.engine.routes import ROUTED_EXPERTS, prepare_replay
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
from verl.workers.roles.generator import (
    Generator,
    shares_weights,
    update_bucket_bytes,
)
from verl.workers.roles.teacher import MESH as TEACHER_MESH
from verl.workers.roles.teacher import TeachingWorker
from verl.workers.roles.worker import (
    CheckpointedWorker,
    RankWorker,
    engine_options,
    engine_section,
    update_passes,
    utilisation,
)
from verl.workers.rollout.base import Rollout
from verl.workers.rollout.engine_weights import KeptWeights, exhaust, on_host, send_to_ports
from verl.workers.rollout.factory import has_own_process, ranks_per_engine
from verl.workers.rollout.polling import Poll, PollReport
from verl.workers.rollout.process.client import EngineProcess
from verl.workers.rollout.process.hosted import EngineFacts
from verl.workers.rollout.publish import CheckSettings
from verl.workers.rollout.trained import Answer, log_probs_of, scrambled
from verl.workers.weight_sync import Published, WeightSender

MESH = "actor"
ROLLOUT_MESH = "rollout"

logger = logging.getLogger(__name__)


class GeneratingWorker(RankWorker):
    """A rank with a rollout engine; `init_model` of a subclass builds the generator."""

    config: ActorRolloutRefConfig
    generator: Generator

    def build_generator(self) -> Generator:
        return Generator(
            self.config,
            device=self.device,
            rank=self.rank,
            create_subgroups=self.create_subgroups,
        )

    @property
    def rollout(self) -> Rollout:
        """The engine itself, for callers in this process."""
        return self.generator.rollout

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.generator.tokenizer

    def stop_rollout(self) -> None:
        """End the rollout engine, if `init_model` came as far as that."""
        generator: Generator | None = getattr(self, "generator", None)
        if generator is not None:
            generator.stop()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_poll(self, poll: Poll) -> PollReport:
        """Let requests in, generate for a while, and tell what has ended."""
        return self.generator.poller.poll(poll)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_version(self) -> int:
        """Updates that the engine's weights have seen."""
        return self.rollout.policy_version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_restarts(self) -> int:
        """How often the engine had to be restarted."""
        return self.rollout.num_restarts

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_is_alive(self) -> bool:
        """Whether the engine that this rank leads can be called; true if it leads none."""
        return not self.generator.leads_engine or self.rollout.is_alive()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_facts(self) -> EngineFacts | None:
        """The facts of the engine's process, from the rank that leads one."""
        is_led = self.generator.leads_engine and isinstance(self.rollout, EngineProcess)
        return self.generator.facts() if is_led else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_sleep(self) -> None:
        self.rollout.sleep()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_wake_up(self) -> None:
        self.rollout.wake_up()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=ROLLOUT_MESH))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Continue every row once. For users' own loops; the trainer's ask the engines directly."""
        return self.generator.generate_sequences(prompts)


class ActorRolloutRefWorker(
    GeneratingWorker, TeachingWorker, CheckpointedWorker, DistProfilerExtension
):
    """Actor, rollout and reference policy of one rank; `role` names which of them it plays. With
    `distillation_config` it learns from teachers, which it holds unless they have own ranks."""

    engine: BaseEngine
    policy: Policy
    reference: Reference
    _kept: KeptWeights | None = None

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        role: str,
        *,
        device: str | None = None,
        total_training_steps: int | None = None,
        distillation_config: DistillationConfig | None = None,
    ) -> None:
        super().__init__()
        config = omega_conf_to_dataclass(config, ActorRolloutRefConfig)
        self.distillation = distillation_config
        DistProfilerExtension.__init__(self, DistProfiler(self.rank, config.actor.profiler))
        self.config = config
        self.device = device or get_device_name()
        self.is_actor, self.is_ref = "actor" in role, "ref" in role
        self.is_rollout = "rollout" in role
        if total_training_steps is not None:
            config.actor.optim.total_training_steps = total_training_steps
        for mesh in (MESH, TEACHER_MESH):
            self.register_rows(mesh, engine_section(config.actor))
        if self.is_rollout:
            size = ranks_per_engine(config.rollout)
            self.register_mesh(ROLLOUT_MESH, ranks_per_sequence=size)

    # ---- building --------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the policy with its rollout engine, and the reference, where the role has them."""
        self.init_process_group(timeout_seconds=self.config.nccl_timeout)
        engine = engine_section(self.config.actor)
        if isinstance(engine, FSDPEngineConfig):  # Megatron makes its groups itself
            self.sequence_group = self.create_subgroups(engine.ulysses_sequence_parallel_size)
        if self.is_actor:
            self._init_actor()
        if self.is_ref:
            self.reference = self._build_reference()

    def _init_actor(self) -> None:
        config, actor = self.config, self.config.actor
        self.engine = EngineRegistry.new(
            EngineSpec(
                model=config.model,
                device=self.device,
                **engine_options(actor),
                gradient_checkpointing=config.model.enable_gradient_checkpointing,
                activation_offload=config.model.enable_activation_offload,
                is_exact=config.rollout.exact,
                freezes_tower=actor.freeze_vision_tower,
                keeps_start=self.is_ref or self.distillation is not None,
                is_shared=self.is_rollout and not has_own_process(config.rollout.name),
                sequence_group=self.sequence_group,
            )
        )
        prepare_replay(self.engine, actor.router_replay.mode, is_exact=config.rollout.exact)
        self.flops = FlopsCounter(self.engine.module.config)
        self.policy = Policy(actor, self.engine, self.distiller(actor, self.engine))
        self.generator = self.build_generator()
        if self.is_rollout:
            self.generator.start(self.engine, sequence_group=self.sequence_group)
        else:
            self.generator.train_exactly(self.engine)
        tokenizer = WithProcessorFiles(self.tokenizer, copy_to_local(config.model.path))
        self.keep_checkpoints(self.engine, actor.checkpoint, tokenizer)

    def _build_reference(self) -> Reference:
        """The policy itself where its adapters can be taken off, else a frozen model beside it."""
        config = self.config
        if self.is_actor and has_lora(self.engine.module) and config.ref.model.path is None:
            return Reference(self.engine)
        engine: Any = engine_section(config.ref)
        return Reference(
            EngineRegistry.new(
                EngineSpec(
                    model=config.model,
                    engine=engine,
                    backend="megatron" if isinstance(engine, McoreEngineConfig) else None,
                    optimizer=None,
                    device=self.device,
                    path=config.ref.model.path,
                    is_exact=config.rollout.exact,
                    sequence_group=self.sequence_group,
                )
            )
        )

    # ---- log-probabilities and updates -----------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_settings(self) -> UpdateSettings:
        """How the rows of an update are split into optimizer steps and micro-batches."""
        actor = self.config.actor
        return UpdateSettings(
            rows_per_step=self.policy.rows_per_step(self.config.rollout.n),
            micro_batching=self.policy.micro_batching(),
            epochs=actor.ppo_epochs,
            shuffle_seed=actor.data_loader_seed if actor.shuffle else None,
            keeps_prompts_whole=self.policy.keeps_prompts_whole,
        )

    @register(
        dispatch_mode=dispatch_inference(MESH, "actor"),
        columns=(*INFERENCE_COLUMNS, ROUTED_EXPERTS),
    )
    @DistProfiler.annotate(role="actor_compute_log_prob")
    @tqbridge()
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`old_log_probs` and `entropys` of the responses under the current policy.

        With `actor.calculate_sum_pi_squared` also `sum_pi_squared`.
        """
        temperature, start = self.config.rollout.temperature, time.perf_counter()
        columns = self.policy.compute_log_prob(
            model_rows(data),
            micro_batching=planned_passes(data) or self.inference_settings("actor"),
            temperature=temperature,
        )
        seconds = time.perf_counter() - start
        names = {"log_probs": "old_log_probs", "entropy": "entropys"}
        tensors = {names.get(name, name): column.cpu() for name, column in columns.items()}
        return DataProto.from_dict(
            tensors={**tensors, **row_column(data)},
            meta_info={
                "temperature": temperature,
                "old_policy_version": self.engine.policy_version,
                "metrics": utilisation("actor_infer", self.flops, data, seconds, passes=1 / 3),
            },
        )

    @register(dispatch_mode=dispatch_inference(MESH, "ref"), columns=INFERENCE_COLUMNS)
    @DistProfiler.annotate(role="ref_compute_log_prob")
    @tqbridge()
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_log_prob` of the responses under the reference, at the rollout temperature."""
        log_probs = self.reference.compute_log_prob(
            model_rows(data),
            micro_batching=planned_passes(data) or self.inference_settings("ref"),
            temperature=self.config.rollout.temperature,
        )
        return DataProto.from_dict(tensors={"ref_log_prob": log_probs.cpu(), **row_column(data)})

    @register(dispatch_mode=dispatch_update(MESH))
    @tqbridge()
    def update_actor(self, data: DataProto) -> DataProto:
        """Train on the batch; the metrics come back in `meta_info["metrics"]`.

        The rollout engine of this rank has the new weights when it returns, unless `meta_info` says
        `publishes=False`: then that waits until `update_weights`.
        """
        config, start = self.config, time.perf_counter()
        with self.profiler.annotated("actor_update"):
            metrics = self.policy.update_policy(
                model_rows(data),
                rows_per_step=self.policy.rows_per_step(config.rollout.n),
                temperature=config.rollout.temperature,
                old_policy_version=data.meta_info.get("old_policy_version"),
                plan=update_plan(data),
            )
            if data.meta_info.get("publishes", True):
                metrics.update(self.update_weights())
        seconds = time.perf_counter() - start
        passes = update_passes(config.actor.ppo_epochs, self.engine.module)
        metrics.update(utilisation("actor", self.flops, data, seconds, passes=passes))
        return DataProto(meta_info={"metrics": metrics})

    # ---- publishing ------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def shares_weights(self) -> bool:
        """Whether the engine generates with the very weights that are trained."""
        return shares_weights(self.config, self.engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, in_flight: bool = False) -> dict[str, float]:
        """Bring the rollout engine to the trained weights; nothing to do where it has them.

        With `in_flight` requests may run meanwhile. The metrics of it: how far an engine with code
        of its own is off.
        """
        return self.generator.sync(self.engine, in_flight=in_flight)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def keep_weights(self) -> None:
        """Keep a copy in host memory of what the engines have now, which is what is trained.

        An engine that is lost later gets these, although training has gone on. Every rank that may
        have to give them to an engine has a copy.
        """
        version, weights = self.engine.policy_version, self.generator.sent_tensors(self.engine)
        has_engine = self.generator.leads_engine if self.is_rollout else self.rank == 0
        if has_engine:
            self._kept = KeptWeights(version, {name: on_host(weight) for name, weight in weights})
        exhaust(weights)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restore_weights(self) -> None:
        """Give the kept weights to the engine of this rank, if it has lost them."""
        if self._kept is not None and self.is_rollout:
            self.generator.restore(self._kept)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_kept_weights(
        self, addresses: Sequence[tuple[str, int]], token: str
    ) -> Published | None:
        """Like `send_weights`, of the weights that are kept; the first rank serves all."""
        if self._kept is None:
            return None
        return send_to_ports(
            self._sender,
            iter(self._kept.weights.items()),
            self._kept.version,
            addresses,
            token,
            timeout_seconds=self.config.nccl_timeout,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check_settings(self) -> CheckSettings:
        """What a rollout engine is compared by with this policy."""
        return self.generator.check_settings(self.engine)

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
        return send_to_ports(
            self._sender,
            weights,
            self.engine.policy_version,
            addresses[self.rank :: self.world_size],
            token,
            timeout_seconds=self.config.nccl_timeout,
        )

    @cached_property
    def _sender(self) -> WeightSender:
        return WeightSender(update_bucket_bytes(self.config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def trained_version(self) -> int:
        """Updates that the trained weights have seen."""
        return self.engine.policy_version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def score_answers(self, answers: Sequence[Answer], temperature: float) -> list[Tensor]:
        """Log-probabilities under the trained policy of the responses of an engine elsewhere."""
        return log_probs_of(self.engine, answers, temperature=temperature)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Continue from a folder that the caller has verified; the rollout engine does, too."""
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
        if self.generator.weights is not None:
            self.generator.weights.invalidate()  # other weights may have the same number
        self.update_weights()


class RolloutWorker(GeneratingWorker):
    """One rank that only generates; `config` is the whole section of the policy.

    It holds the policy, or with `tensor_model_parallel_size` its shard. Weights for an engine in a
    process of its own go straight there, past the rank that leads it. It generates only with
    weights that arrived whole and carry the actor's version.
    """

    _expects_weights = False
    _stall_seconds = 0.0

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        *,
        device: str | None = None,
        total_training_steps: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.device = device or get_device_name()
        self.register_mesh(ROLLOUT_MESH, ranks_per_sequence=ranks_per_engine(config.rollout))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Start the engine; it generates nothing before the actor's weights have come."""
        self.init_process_group(timeout_seconds=self.config.nccl_timeout)
        self.generator = self.build_generator()
        self.generator.start_on_copy()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def accept_weights(
        self, token: str, ranks: Sequence[int] | None = None, in_flight: bool = False
    ) -> tuple[str, int] | None:
        """Open a port for one update, where a sender that knows the token finds it.

        From now on nothing is generated until the update has come; with `in_flight` requests may
        run, and pause when `receive_weights` is called. None from a rank that gets no
        weights: it is not among `ranks`, or another one leads its engine.
        """
        self._expects_weights = False
        if ranks is not None and self.rank not in ranks:
            return None
        assert self.generator.weights is not None
        host, _ = self.get_available_master_addr_port()
        address = self.generator.weights.accept(token, host, in_flight=in_flight)
        self._expects_weights = address is not None
        return address

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_weights(self) -> Published | None:
        """Take in the update for which a port is open; what this rank's engine holds then."""
        if not self._expects_weights:
            return None
        self._expects_weights = False
        assert self.generator.weights is not None
        start = time.perf_counter()
        with self.generator.paused():
            published = self.generator.weights.receive(self.config.nccl_timeout)
        seconds = {"stall": time.perf_counter() - start} | dict(self.generator.weights.seconds)
        self._stall_seconds = seconds["stall"]
        return published

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stall_seconds(self) -> float:
        """For how long this rank's engine generated nothing during the last update."""
        return self._stall_seconds
