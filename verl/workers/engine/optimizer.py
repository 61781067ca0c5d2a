"""An optimizer step that keeps fp32 master weights and never moves a parameter.

The model's parameters stay at their addresses in the compute dtype; the optimizer works on fp32
copies and writes the result back in place, so that a rollout engine sharing the storage sees the
new weights at once, and a small learning rate is not lost to bf16 rounding. In fp32 the parameter
is its own master. A step whose gradient is not finite changes nothing and is counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from verl.config.optimizer import FSDPOptimizerConfig
from verl.utils import schedules


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    """Global norm of the gradient before clipping."""

    is_applied: bool
    """False when the gradient was not finite and the weights were left alone."""


class MasterOptimizer:
    """AdamW (or another torch optimizer) over fp32 masters of a model's trainable parameters."""

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: FSDPOptimizerConfig
    ) -> None:
        self.config = config
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self.masters = {name: master_of(p) for name, p in self.parameters.items()}
        self.optimizer = build_optimizer(self.masters.values(), config)
        self.schedule = build_schedule(self.optimizer, config)
        self.num_skipped_steps = 0
        self._num_writes = self._count_writes()

    @property
    def learning_rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    @torch.no_grad()
    def step(self, max_norm: float) -> StepResult:
        """Clip by global norm, update the masters, write back, clear the gradients."""
        self._follow_others_writes()
        self._move_gradients_to_masters()
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), max_norm)
        grad_norm = float(norm)
        is_finite = bool(torch.isfinite(norm))
        if is_finite:
            self.optimizer.step()
            self._write_back()
        else:
            self.num_skipped_steps += 1
        self.zero_grad()
        return StepResult(grad_norm, is_finite)

    def zero_grad(self) -> None:
        for parameter in (*self.parameters.values(), *self.masters.values()):
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs: masters, moments, schedule, counters."""
        return {
            "masters": dict(self.masters),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "num_skipped_steps": self.num_skipped_steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, master in self.masters.items():
            master.copy_(state["masters"][name])
        self._write_back()
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.num_skipped_steps = int(state["num_skipped_steps"])

    def _move_gradients_to_masters(self) -> None:
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if parameter.grad is None:
                master.grad = torch.zeros_like(master)
            elif master is not parameter:
                master.grad = parameter.grad.float()
                parameter.grad = None

    def _write_back(self) -> None:
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])
        self._num_writes = self._count_writes()

    def _follow_others_writes(self) -> None:
        """Weights that somebody else has written (a checkpoint without optimizer state, a user's
        code) are what training continues from; the next step would undo them otherwise."""
        for name, count in self._count_writes().items():
            if count != self._num_writes[name] and self.masters[name] is not self.parameters[name]:
                self.masters[name].copy_(self.parameters[name])

    def _count_writes(self) -> dict[str, int]:
        return {name: parameter._version for name, parameter in self.parameters.items()}


def master_of(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(parameter.detach().float())


def build_optimizer(
    parameters: Iterable[Tensor], config: FSDPOptimizerConfig
) -> torch.optim.Optimizer:
    """The class that `optimizer_impl` and `optimizer` name, with the config's arguments."""
    kind = getattr(import_module(config.optimizer_impl), config.optimizer)
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": tuple(config.betas),
        "weight_decay": config.weight_decay,
        **(config.override_optimizer_config or {}),
    }
    if "betas" not in signature(kind).parameters:  # SGD and others without moments
        del options["betas"]
    return kind(list(parameters), **options)


def build_schedule(
    optimizer: torch.optim.Optimizer, config: FSDPOptimizerConfig
) -> torch.optim.lr_scheduler.LambdaLR:
    """Warm-up by steps, else by ratio; then constant, cosine or linear."""
    total = config.total_training_steps
    warmup = config.lr_warmup_steps
    if warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * max(total, 0))
    if config.lr_scheduler_type == "constant":
        return schedules.get_constant_schedule_with_warmup(optimizer, warmup)
    if total <= 0:
        raise ValueError(
            f"a {config.lr_scheduler_type} schedule needs its length, but "
            f"optim.total_training_steps is {total}; the trainer fills it in, set it yourself "
            "in a script of your own"
        )
    if config.lr_scheduler_type == "linear":
        return schedules.get_linear_schedule_with_warmup(
            optimizer, warmup, total, min_lr_ratio=config.min_lr_ratio
        )
    return schedules.get_cosine_schedule_with_warmup(
        optimizer, warmup, total, min_lr_ratio=config.min_lr_ratio, num_cycles=config.num_cycles
    )
