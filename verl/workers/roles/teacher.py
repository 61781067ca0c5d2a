"""Teachers of a distillation, in the policy's workers or in workers of their own.

`TeachingWorker` is what both have in common: frozen models, built like the reference, and a method
that tells what they say of responses. `TeacherWorker` is a rank that does nothing else.
"""

import torch.distributed as dist

from verl.config.actor import ActorConfig
from verl.config.convert import omega_conf_to_dataclass
from verl.config.distillation import DistillationConfig
from verl.config.ppo import ActorRolloutRefConfig
from verl.data_plane.batch import tqbridge
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.workers.actor.distiller import Distiller
from verl.workers.actor.teacher import (
    TEACHER_COLUMNS,
    Teacher,
    build_teachers,
    num_top_tokens,
    teacher_columns,
)
from verl.workers.engine import BaseEngine
from verl.workers.roles.dispatch import (
    INFERENCE_COLUMNS,
    dispatch_inference,
    model_rows,
    planned_passes,
    row_column,
)
from verl.workers.roles.worker import RankWorker, engine_section, ranks_per_sequence
from verl.workers.schedule import MicroBatching

MESH = "teacher"


class TeachingWorker(RankWorker):
    """A rank that may hold teachers; `distillation` is None where there are none."""

    config: ActorRolloutRefConfig
    distillation: DistillationConfig | None = None
    sequence_group: dist.ProcessGroup | None = None
    teachers: tuple[Teacher, ...] = ()

    def distiller(self, actor: ActorConfig, policy: BaseEngine) -> Distiller | None:
        """The distillation part of the policy's loss; starts the teachers that are on this rank."""
        if self.distillation is None:
            return None
        if not self.distillation.nnodes:
            self.start_teachers(policy)
        return Distiller(self.distillation.distillation_loss, actor, self.teachers)

    def start_teachers(self, policy: BaseEngine | None = None) -> None:
        assert self.distillation is not None
        built = build_teachers(
            self.config,
            self.distillation,
            device=self.device,
            sequence_group=self.sequence_group,
            policy=policy,
        )
        self.teachers = tuple(built)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def inference_settings(self, model: str) -> MicroBatching:
        """How the rows of a pass without gradients are split, for `actor`, `ref` or `teacher`."""
        section = self.config.rollout if model == "actor" else self.config.ref
        return MicroBatching.of(
            by_tokens=section.log_prob_use_dynamic_bsz,
            tokens=section.log_prob_max_token_len_per_gpu,
            rows=section.log_prob_micro_batch_size_per_gpu,
            ranks_per_sequence=ranks_per_sequence(engine_section(self.config.actor)),
        )

    @register(
        dispatch_mode=dispatch_inference(MESH, "teacher"),
        columns=(*INFERENCE_COLUMNS, *TEACHER_COLUMNS),
    )
    @tqbridge()
    def compute_teacher_log_prob(self, data: DataProto) -> DataProto:
        """`teacher_log_probs` of the responses, at the rollout temperature, and with a mode *_topk
        `teacher_topk_ids` and `teacher_topk_log_probs`."""
        assert self.distillation is not None
        columns = teacher_columns(
            self.teachers,
            model_rows(data),
            micro_batching=planned_passes(data) or self.inference_settings("teacher"),
            temperature=self.config.rollout.temperature,
            top_k=num_top_tokens(self.distillation.distillation_loss),
        )
        return DataProto.from_dict(tensors={**columns, **row_column(data)})


class TeacherWorker(TeachingWorker):
    """One rank that only teaches; `config` is the whole section of the policy."""

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        distillation_config: DistillationConfig,
        *,
        device: str | None = None,
        total_training_steps: int | None = None,
    ) -> None:
        super().__init__()
        self.config = omega_conf_to_dataclass(config, ActorRolloutRefConfig)
        self.distillation = distillation_config
        self.device = device or get_device_name()
        self.register_mesh(MESH, ranks_per_sequence=1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.init_process_group(timeout_seconds=self.config.nccl_timeout)
        self.start_teachers()
