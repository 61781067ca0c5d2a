"""The distillation part of a policy's loss.

    L = [L_pg] + distillation_loss_coef * D          with and without task rewards
    D = mean_t D_t                                   a divergence, differentiated
    D = L_pg(advantages = -D_t)                      `use_policy_gradient`: a reward

Means are those of `actor.loss_agg_mode` over the response tokens of the whole optimizer step. D_t
is made of the columns that a teacher put into the batch, or, over the whole vocabulary, in the
training pass itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from verl.algos.distillation import FULL, TOP_K
from verl.algos.registry import get_policy_loss_fn, loss_and_metrics, weights_argument
from verl.config.actor import ActorConfig
from verl.config.distillation import DistillationLossConfig
from verl.workers.actor.teacher import TEACHER_LOG_PROBS, TOP_IDS, TOP_LOG_PROBS, divergence_of
from verl.workers.engine.base import Columns
from verl.workers.engine.outputs import Outputs, StatesOfTeacher, ToTeachers

Aggregate = Callable[[Tensor, Tensor], Tensor]


class Distiller:
    """What a policy asks its training pass for, and the loss that it makes of it."""

    def __init__(
        self,
        loss: DistillationLossConfig,
        actor: ActorConfig,
        teachers: Sequence[StatesOfTeacher] = (),
    ) -> None:
        """`teachers` are compared over the whole vocabulary; other modes need none here."""
        self.config = loss
        self.divergence = divergence_of(loss)
        self._teachers = tuple(teachers)
        self._actor = replace(
            actor,
            clip_ratio=loss.clip_ratio,
            clip_ratio_low=loss.clip_ratio_low,
            clip_ratio_high=loss.clip_ratio_high,
            policy_loss=replace(actor.policy_loss, loss_mode=loss.policy_loss_mode),
        )
        self._policy_loss = get_policy_loss_fn(loss.policy_loss_mode)

    def outputs(self) -> Outputs:
        """What the training pass computes for this loss."""
        if self.config.loss_mode in FULL:
            request = ToTeachers(divergence=self.divergence, teachers=self._teachers)
            return Outputs(to_teachers=request)
        return Outputs(log_probs_at=TOP_IDS if self.config.loss_mode in TOP_K else None)

    def loss(
        self,
        columns: Columns,
        rows: TensorDict,
        old_log_prob: Tensor,
        aggregate: Aggregate,
        counts: dict[str, Any],
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss of some rows, its coefficient included, and what is reported of it.

        `aggregate(values, mask)` divides by the counts of the whole step, which `counts` are.
        """
        mask = rows["response_mask"]
        distance, report = self._divergences(columns, rows, old_log_prob)
        limit = self.config.loss_max_clamp
        if limit is not None:
            distance = distance.clamp(-limit, limit)
        distance = distance.masked_fill(mask == 0, 0)
        report["distillation/divergence"] = masked_mean(distance, mask)
        if self.config.use_policy_gradient:
            self._actor.global_batch_info = counts
            returned = self._policy_loss(
                old_log_prob=old_log_prob,
                log_prob=columns["log_probs"],
                advantages=-distance.detach(),
                response_mask=mask,
                loss_agg_mode=self._actor.loss_agg_mode,
                config=self._actor,
                **weights_argument(self._policy_loss, rows.get("rollout_is_weights", None)),
            )
            loss, _ = loss_and_metrics(returned)
        else:
            loss = aggregate(distance, mask)
        loss = self.config.distillation_loss_coef * loss
        report["distillation/loss"] = loss.detach()
        return loss, report

    def _divergences(
        self, columns: Columns, rows: TensorDict, old_log_prob: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """(B, T) of every response token, and metrics."""
        mode, mask = self.config.loss_mode, rows["response_mask"]
        if mode in FULL:
            same = masked_mean(columns["same_top"], mask)
            return columns["divergence"], {"distillation/top1_agreement": same}
        log_prob, teacher = columns["log_probs"], rows[TEACHER_LOG_PROBS]
        report = {"distillation/teacher_kl": masked_mean(log_prob - teacher, mask)}
        if mode in TOP_K:
            chosen, known = columns["log_probs_at"], rows[TOP_LOG_PROBS]
            report["distillation/student_mass"] = masked_mean(chosen.exp().sum(-1), mask)
            report["distillation/teacher_mass"] = masked_mean(known.exp().sum(-1), mask)
            return self.divergence.top_k(chosen, known), report
        if self.config.use_policy_gradient:  # the advantage of what was sampled, by who sampled it
            log_prob = old_log_prob
        return self.divergence.sampled(log_prob, teacher), report


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Over the response tokens; 0 where there are none."""
    total = values.detach().masked_fill(mask == 0, 0).sum()
    return total / mask.sum().clamp_min(1)
