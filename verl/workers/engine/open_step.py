"""A training step between its first pass and its optimizer step: what has been added so far."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl.workers.engine.base import TrainResult
from verl.workers.engine.optimizer import StepResult


@dataclass
class OpenStep:
    """Passes whose gradient waits for the optimizer."""

    num_splits_before: int
    """Micro-batches that had been run in halves, for want of memory, when the step began."""

    loss_scale: float | None
    passes: list[tuple[Tensor, dict[str, Any]]] = field(default_factory=list)
    """The loss of each pass and what the loss function reported of it."""

    def result(
        self,
        step: StepResult,
        *,
        learning_rate: float,
        num_splits: int,
        gradient_factor: float,
    ) -> TrainResult:
        """What the step has become; `num_splits` are the splits until now."""
        losses = [loss for loss, _ in self.passes]
        return TrainResult(
            loss=gradient_factor * sum(torch.stack(losses).tolist()) if losses else 0.0,
            grad_norm=step.grad_norm,
            learning_rate=learning_rate,
            is_applied=step.is_applied,
            num_micro_batches=len(self.passes),
            metrics=[report for _, report in self.passes],
            num_oom_splits=num_splits - self.num_splits_before,
            loss_scale=self.loss_scale,
        )
