"""The optimizer step: fp32 master weights, clipping, loss scale. It never moves a parameter.

The model's parameters stay at their addresses in the compute dtype; the optimizer works on fp32
copies and writes the result back in place, so that a rollout engine sharing the storage sees the
new weights at once, and a small learning rate is not lost to bf16 rounding. In fp32 the parameter
is its own master. A step whose gradient is not finite changes nothing and is counted. In fp16 the
gradient comes multiplied by `loss_scale` and is divided here, in fp32. With `offload` masters and
moments are in CPU memory between steps.
"""

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from verl.config.optimizer import FSDPOptimizerConfig
from verl.utils.checkpoint.pieces import FlatSlice, Part, local_tensor
from verl.utils.torch_functional import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)
from verl.workers.engine.residency import OffloadedState

logger = logging.getLogger(__name__)

INITIAL = 2.0**16
LARGEST = 2.0**24
GROWTH_INTERVAL = 2000
"""Good steps in a row before a larger factor is tried."""

WINDOW = 100
"""Attempts at a step over which those that overflowed are counted."""

TENSORS_AT_ONCE = 32
"""Gradients that are turned into fp32 together; both copies exist meanwhile."""


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer step."""

    grad_norm: float
    """Global norm of the gradient before clipping."""

    is_applied: bool
    """False when the gradient was not finite and the weights were left alone."""


class MasterOptimizer:
    """AdamW (or another torch optimizer) over fp32 masters of a model's trainable parameters."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: FSDPOptimizerConfig,
        *,
        offload: bool = False,
    ) -> None:
        named = list(parameters)
        self.parameters = {name: p for name, p in named if p.requires_grad}
        self.masters = {name: self._master_of(p) for name, p in self.parameters.items()}
        self.optimizer = build_optimizer(self.masters.values(), config)
        self.schedule = build_schedule(self.optimizer, config)
        self.num_skipped_steps = 0
        is_half = any(p.dtype == torch.float16 for _, p in named)  # also around fp32 adapters
        self.loss_scale = LossScale() if is_half else None
        self._num_writes = self._count_writes()
        self._offloaded = (
            OffloadedState(self.optimizer, self._separate_masters())
            if offload and self.masters
            else None
        )

    @property
    def learning_rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    @torch.no_grad()
    def step(self, max_norm: float) -> StepResult:
        """Clip by global norm, update the masters, write back, clear the gradients."""
        with self.state_on_device():
            self._follow_others_writes()
            self._move_gradients_to_masters()
            self._unscale_gradients()
            grad_norm = self._clip_gradients(max_norm)
            is_finite = math.isfinite(grad_norm)
            if is_finite:
                self.optimizer.step()
                self._write_back()
            self.zero_grad()
        self.num_skipped_steps += not is_finite
        if self.loss_scale is not None:
            self.loss_scale.update(is_finite=is_finite)
        return StepResult(grad_norm, is_finite)

    def zero_grad(self) -> None:
        for parameter in (*self.parameters.values(), *self.masters.values()):
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs: masters, moments, schedule, counters.

        Of masters and moments it has what this rank holds, marked as a part of the whole tensor.
        """
        state = {
            "masters": {name: self._as_part(name, m) for name, m in self.masters.items()},
            "optimizer": self._moments_as_parts(self.optimizer.state_dict()),
            "schedule": self.schedule.state_dict(),
            "num_skipped_steps": self.num_skipped_steps,
        }
        if self.loss_scale is not None:
            state["loss_scale"] = self.loss_scale.state_dict()
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A run that was not in fp16 before has no loss scale to continue; it starts anew."""
        with self.state_on_device():
            for name, master in self.masters.items():
                master.copy_(local_tensor(state["masters"][name]))
            self._write_back()
            self.optimizer.load_state_dict(local_tensors(state["optimizer"]))
        self.schedule.load_state_dict(state["schedule"])
        self.num_skipped_steps = int(state["num_skipped_steps"])
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.load_state_dict(state["loss_scale"])

    def _as_part(self, name: str, tensor: Tensor) -> Part:
        """A master of parameter `name`, or a moment of it, as what it is of the whole tensor."""
        return tensor

    def _moments_as_parts(self, state: dict[str, Any]) -> dict[str, Any]:
        """torch numbers the masters in their order."""
        names = list(self.masters)
        marked = {
            number: {
                key: self._as_part(names[number], value) if is_moment(value) else value
                for key, value in moments.items()
            }
            for number, moments in state["state"].items()
        }
        return {**state, "state": marked}

    def bytes_to_come(self) -> int:
        """What the first step will add to the device and keep there: Adam's two moments, or one."""
        defaults = self.optimizer.defaults
        num_moments = 2 if "betas" in defaults else bool(defaults.get("momentum"))
        if self._offloaded is not None or self.optimizer.state:
            num_moments = 0
        return num_moments * sum(m.numel() * m.element_size() for m in self.masters.values())

    def state_on_device(self) -> AbstractContextManager[None]:
        """Masters and moments are on the device while the context lasts."""
        return nullcontext() if self._offloaded is None else self._offloaded.on_device()

    def _move_gradients_to_masters(self) -> None:
        for pairs in self._in_groups():
            moving = []
            for parameter, master in pairs:
                if parameter.grad is None:
                    master.grad = torch.zeros_like(master)
                elif master is not parameter:
                    moving.append((parameter.grad, torch.empty_like(master)))
                    master.grad, parameter.grad = moving[-1][1], None
            copy_all(moving)

    def _unscale_gradients(self) -> None:
        """Divide by the loss scale, whose inverse is exact."""
        if self.loss_scale is not None and self.loss_scale.value != 1:
            gradients = [master.grad for master in self.masters.values()]
            multiply_all(gradients, 1.0 / self.loss_scale.value)  # pyright: ignore[reportArgumentType]

    def _clip_gradients(self, max_norm: float) -> float:
        """The norm of all gradients together; where it is above `max_norm`, they are scaled."""
        return float(torch.nn.utils.clip_grad_norm_(self.masters.values(), max_norm))

    def _master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        return master_of(parameter)

    def _separate_masters(self) -> list[nn.Parameter]:
        """Masters with their own storage: an fp32 weight is its own master."""
        return [m for name, m in self.masters.items() if m is not self.parameters[name]]

    def _in_groups(self) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
        pairs = [(p, self.masters[name]) for name, p in self.parameters.items()]
        for start in range(0, len(pairs), TENSORS_AT_ONCE):
            yield pairs[start : start + TENSORS_AT_ONCE]

    def _write_back(self) -> None:
        pairs = [(self.masters[name], p) for name, p in self.parameters.items()]
        copy_all([(master, p) for master, p in pairs if master is not p])
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


def is_moment(value: Any) -> bool:
    """Whether an optimizer keeps this for every element; counters have no dimensions."""
    return isinstance(value, Tensor) and value.dim() > 0


def local_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with this rank's own storage in place of parts."""
    moments = {
        number: {
            key: local_tensor(value) if isinstance(value, (Tensor, FlatSlice)) else value
            for key, value in entries.items()
        }
        for number, entries in state["state"].items()
    }
    return {**state, "state": moments}


def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """The first of each pair into the second, in few kernels."""
    if pairs:
        sources, targets = [list(tensors) for tensors in zip(*pairs, strict=True)]
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def multiply_all(tensors: list[Tensor], factor: float) -> None:
    if tensors:
        torch._foreach_mul_(tensors, factor)  # pyright: ignore[reportPrivateImportUsage]


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
    known = signature(kind).parameters
    if "betas" not in known:  # SGD and others without moments
        del options["betas"]
    parameters = list(parameters)
    is_free = "fused" in known and "foreach" not in options  # torch takes one of the two
    if is_free and parameters and all(p.is_cuda for p in parameters):
        options.setdefault("fused", True)
    return kind(parameters, **options)


def build_schedule(
    optimizer: torch.optim.Optimizer, config: FSDPOptimizerConfig
) -> torch.optim.lr_scheduler.LambdaLR:
    """Warm-up by steps, else by ratio; then constant, cosine or linear."""
    total = config.total_training_steps
    warmup = config.lr_warmup_steps
    if warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * max(total, 0))
    if config.lr_scheduler_type == "constant":
        return get_constant_schedule_with_warmup(
            optimizer, warmup, zero_indexed_step=config.zero_indexed_step
        )
    if total <= 0:
        raise ValueError(
            f"a {config.lr_scheduler_type} schedule needs its length, but "
            f"optim.total_training_steps is {total}; the trainer fills it in, set it yourself "
            "in a script of your own"
        )
    if config.lr_scheduler_type == "linear":
        return get_linear_schedule_with_warmup(
            optimizer,
            warmup,
            total,
            min_lr_ratio=config.min_lr_ratio or 0.0,
            zero_indexed_step=config.zero_indexed_step,
        )
    return get_cosine_schedule_with_warmup(
        optimizer,
        warmup,
        total,
        min_lr_ratio=config.min_lr_ratio or 0.0,
        num_cycles=config.num_cycles,
        zero_indexed_step=config.zero_indexed_step,
    )


class LossScale:
    """A factor on the loss that keeps fp16 gradients from vanishing (arXiv:1710.03740).

    fp16 has no number between 0 and 6e-8, and most gradients of a language model lie there. The
    loss is multiplied before the backward pass and the fp32 copy of the gradient is divided before
    anything reads it. The factor is a power of two, so neither rounds. It is halved whenever a
    gradient overflows (the engine then computes it again) and doubled after many good steps.
    """

    def __init__(self, value: float = INITIAL, growth_interval: int = GROWTH_INTERVAL) -> None:
        self.value = value
        self.growth_interval = growth_interval
        self.num_good_steps = 0
        self._is_skipped = deque[bool](maxlen=WINDOW)

    @property
    def num_recent_skips(self) -> int:
        """Attempts that overflowed among the last `WINDOW`."""
        return sum(self._is_skipped)

    def update(self, *, is_finite: bool) -> None:
        """Record an attempt at a step: whether its scaled gradient was finite."""
        self._is_skipped.append(not is_finite)
        if not is_finite:
            self._shrink()
            return
        self.num_good_steps += 1
        if self.num_good_steps >= self.growth_interval:
            self.value = min(2 * self.value, LARGEST)
            self.num_good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "num_good_steps": self.num_good_steps,
            "is_skipped": list(self._is_skipped),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = float(state["value"])
        self.num_good_steps = int(state["num_good_steps"])
        self._is_skipped = deque(map(bool, state["is_skipped"]), maxlen=WINDOW)

    def _shrink(self) -> None:
        self.num_good_steps = 0
        if self.value > 1:
            self.value /= 2
            return
        logger.warning(
            "the fp16 gradient is not finite even without a loss scale (%d of the last %d attempts "
            "overflowed): it is the loss or the model, not the scale. Look at the data, or set "
            "fsdp_config.dtype to bfloat16",
            self.num_recent_skips,
            len(self._is_skipped),
        )
