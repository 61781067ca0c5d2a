"""Teachers of a distillation: frozen models, or the policy itself, that judge a student's tokens.

A teacher reads the rows of the student, or the same responses after a prompt of its own
(`teacher_prompts`), which may hold what the student does not know. Its columns belong to the
response tokens either way.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.algos.distillation import FULL, TOP_K, Divergence
from verl.config.distillation import (
    DistillationConfig,
    DistillationLossConfig,
    TeacherConfig,
    teachers_of,
)
from verl.config.ppo import ActorRolloutRefConfig
from verl.config.ref import FSDPRefConfig
from verl.models.head import OutputHead
from verl.models.lora import as_started, has_lora
from verl.utils.model import compute_position_id_with_mask
from verl.workers.engine import BaseEngine, EngineRegistry, EngineSpec
from verl.workers.engine.base import Columns
from verl.workers.engine.forward import row_lengths
from verl.workers.engine.inputs import PROMPT_INDEX
from verl.workers.engine.outputs import TEACHER_INDEX, Outputs
from verl.workers.engine.routes import ROUTED_EXPERTS
from verl.workers.schedule import MicroBatching, Passes, split_micro_batches

TEACHER_LOG_PROBS, TOP_IDS, TOP_LOG_PROBS = (
    "teacher_log_probs",
    "teacher_topk_ids",
    "teacher_topk_log_probs",
)
"""Columns of a teacher's answer: (B, T), and (B, T, K) twice."""

PROMPTS, PROMPT_MASK = "teacher_prompts", "teacher_prompt_mask"
"""(B, P'), prompts that only teachers read, padded on the left; columns that need not be there."""

TEACHER_COLUMNS = (TEACHER_INDEX, PROMPTS, PROMPT_MASK)


class Teacher:
    """A model in this process. With `is_start` the engine is the policy's own, and its adapters
    are as training started while it computes."""

    def __init__(self, engine: BaseEngine, *, is_start: bool = False) -> None:
        self.engine = engine
        self._is_start = is_start

    @property
    def is_collective(self) -> bool:
        return self.engine.has_collectives_in_forward

    def states(self, rows: TensorDict) -> Tensor:
        if not self._is_start:
            return self.engine.response_states(teacher_rows(rows))
        with as_started(self.engine.module):
            return self.engine.response_states(teacher_rows(rows))

    def head(self) -> OutputHead:
        return self.engine.output_head()

    def infer(self, data: TensorDict, passes: Passes, temperature: float, top_k: int) -> Columns:
        """Log-probabilities of the response tokens, and with `top_k` the likeliest ones."""
        options: dict[str, Any] = {
            "micro_batching": passes,
            "temperature": temperature,
            "outputs": Outputs(top_k=top_k),
        }
        if not self._is_start:
            return self.engine.infer_batch(teacher_rows(data), **options)
        with as_started(self.engine.module):
            return self.engine.infer_batch(teacher_rows(data), **options)


def teacher_rows(rows: TensorDict) -> TensorDict:
    """The rows as a teacher reads them: with prompts of its own, where there are any, and without
    the routes that the student's experts took."""
    if PROMPTS not in rows.keys():  # noqa: SIM118 (a TensorDict)
        return rows.exclude(ROUTED_EXPERTS)
    num_columns = rows["responses"].shape[1]
    mask = torch.cat([rows[PROMPT_MASK], rows["attention_mask"][:, -num_columns:]], dim=1)
    changed: Any = {
        "input_ids": torch.cat([rows[PROMPTS], rows["input_ids"][:, -num_columns:]], dim=1),
        "attention_mask": mask,
        "position_ids": compute_position_id_with_mask(mask),
    }
    names = ("responses", PROMPT_INDEX)
    kept: Any = {name: rows[name] for name in names if name in rows.keys()}  # noqa: SIM118
    return TensorDict({**kept, **changed}, batch_size=rows.batch_size)


def teacher_columns(
    teachers: Sequence[Teacher],
    data: TensorDict,
    *,
    micro_batching: MicroBatching | Passes,
    temperature: float,
    top_k: int,
) -> dict[str, Tensor]:
    """What each row's teacher says of its response, under the names of the columns."""
    passes = micro_batching
    if isinstance(passes, MicroBatching):
        passes = split_micro_batches(row_lengths(data), passes)
    has_several = TEACHER_INDEX in data.keys()  # noqa: SIM118 (a TensorDict)
    teacher_of = data[TEACHER_INDEX].tolist() if has_several else [0] * len(data)
    total: Columns = {}
    for number, teacher in enumerate(teachers):
        own = [[row for row in rows if teacher_of[row] == number] for rows in passes]
        if not teacher.is_collective:
            own = [rows for rows in own if rows]
        if own:
            found = teacher.infer(data, own, temperature, top_k)
            total = {name: total.get(name, 0) + column for name, column in found.items()}
    names = {"log_probs": TEACHER_LOG_PROBS, "top_ids": TOP_IDS, "top_log_probs": TOP_LOG_PROBS}
    columns = {names[name]: total[name].cpu() for name in names if name in total}
    if TOP_IDS in columns:
        columns[TOP_IDS] = columns[TOP_IDS].to(torch.int32)
    return columns


def divergence_of(loss: DistillationLossConfig) -> Divergence:
    return Divergence(
        mode=loss.loss_mode, jsd_beta=loss.jsd_beta, min_log_prob=loss.log_prob_min_clamp
    )


def num_top_tokens(loss: DistillationLossConfig) -> int:
    """How many tokens of the teacher the loss looks at beside the sampled one."""
    return loss.topk if loss.loss_mode in TOP_K else 0


def answers_in_advance(loss: DistillationLossConfig) -> bool:
    """Whether teachers answer before the update; else their states are compared in its passes."""
    return loss.loss_mode not in FULL


def build_teachers(
    config: ActorRolloutRefConfig,
    distillation: DistillationConfig,
    *,
    device: str,
    sequence_group: Any = None,
    policy: BaseEngine | None = None,
) -> list[Teacher]:
    """The teachers that compute in this process, by number; `policy` may be one of them."""
    assert isinstance(config.ref, FSDPRefConfig)
    spec = EngineSpec(
        model=config.model,
        engine=config.ref.fsdp_config,
        optimizer=None,
        device=device,
        is_exact=config.rollout.exact,
        sequence_group=sequence_group,
    )
    teachers = teachers_of(distillation).values()
    return [build_teacher(one, spec, policy) for one in teachers if not one.is_served]


def build_teacher(teacher: TeacherConfig, spec: EngineSpec, policy: BaseEngine | None) -> Teacher:
    """The policy itself where its weights will do, else a frozen model beside it."""
    if policy is not None and teacher.weights == "current":
        return Teacher(policy)
    if policy is not None and teacher.weights == "start" and has_lora(policy.module):
        return Teacher(policy, is_start=True)
    return Teacher(EngineRegistry.new(replace(spec, path=teacher.model_path)))
