"""How weights are updated: learning rate, its schedule, and the optimizer's own settings.

One class per training back-end, because each back-end has an optimizer of its own; what they
share is `OptimizerConfig`. The schedule advances once per training step, not per mini-batch.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from verl.config.base import BaseConfig, When, never, option

SCHEDULES = ("constant", "linear", "cosine")
DECAYING = When(
    lambda here, run: here.get("lr_scheduler", here.lr_scheduler_type) != "constant",
    "the learning rate does not decay",
)
CHANGING = When(
    lambda here, run: (
        here.lr_scheduler_type != "constant"
        or here.lr_warmup_steps > 0
        or (here.lr_warmup_steps < 0 and here.lr_warmup_steps_ratio > 0)
    ),
    "the learning rate never changes: it is constant, without a warm-up",
)

LOOK_AT_SHAPES = ("Adafactor", "LBFGS", "Muon", "Shampoo", "SOAP")
"""Optimizers whose step on a matrix is not a step on each of its elements."""


@dataclass(kw_only=True)
class OptimizerConfig(BaseConfig):
    """What every optimizer has."""

    _mutable_fields: ClassVar[set[str]] = {"clip_grad", "lr_warmup_steps", "total_training_steps"}

    _target_: str = "verl.workers.config.OptimizerConfig"

    lr: float = option(1e-3, minimum=0)
    """Learning rate after warm-up."""

    lr_warmup_steps_ratio: float = option(
        0.0,
        minimum=0,
        maximum=1,
        used_if=When(lambda here, run: here.lr_warmup_steps < 0, "lr_warmup_steps decides"),
    )
    """Part of the training steps spent on warm-up. Counts only while `lr_warmup_steps` is
    negative."""

    lr_warmup_steps: int = option(-1, minimum=-1)
    """Training steps of warm-up; -1 takes `lr_warmup_steps_ratio` of the total instead."""

    total_training_steps: int = option(-1, minimum=-1, used_if=never("the trainer works it out"))
    """Length of the schedule in training steps. The trainer fills it in; -1 means not known yet."""

    weight_decay: float = option(0.01, minimum=0)
    """Decoupled weight decay: each step shrinks a weight by `lr * weight_decay` of itself."""

    betas: list[float] = option(default_factory=lambda: [0.9, 0.999])
    """Adam's decay rates for the running means of the gradient and of its square."""

    clip_grad: float = option(1.0, above=0)
    """Largest global gradient norm; a longer gradient is scaled down to it."""

    grad_clip: float | None = option(None, above=0)
    """Old name of `clip_grad`."""


@dataclass(kw_only=True)
class FSDPOptimizerConfig(OptimizerConfig):
    """An optimizer class from a Python module, usually `torch.optim.AdamW`."""

    _target_: str = "verl.workers.config.FSDPOptimizerConfig"

    optimizer: str = "AdamW"
    """Name of the optimizer class in `optimizer_impl`."""

    optimizer_impl: str = "torch.optim"
    """Module that holds the optimizer class, for example `torchao.optim`."""

    min_lr_ratio: float | None = option(None, yaml=0.0, minimum=0, maximum=1, used_if=DECAYING)
    """Where the cosine schedule ends, as a part of `lr`; null is 0."""

    num_cycles: float = option(0.5, above=0, used_if=DECAYING)
    """Cosine waves over the run; 0.5 falls once from `lr` to the floor."""

    lr_scheduler_type: str = option("constant", choices=SCHEDULES)
    """Shape of the learning rate after warm-up."""

    zero_indexed_step: bool = option(True, used_if=CHANGING)
    """The first training step is step 0 of the schedule, where a warm-up has rate 0; false makes it
    step 1."""

    warmup_style: str | None = option(None, choices=SCHEDULES)
    """Old name of `lr_scheduler_type`."""

    override_optimizer_config: dict[str, Any] | None = None
    """More keyword arguments for the optimizer's constructor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_style is not None:
            object.__setattr__(self, "lr_scheduler_type", self.warmup_style)


MEGATRON_DECAYS = When(
    lambda here, run: here.lr_decay_style != "constant", "the learning rate does not decay"
)
WSD = When(lambda here, run: here.lr_decay_style == "WSD", "lr_decay_style is not WSD")


@dataclass(kw_only=True)
class McoreOptimizerConfig(OptimizerConfig):
    """Megatron's optimizer and its own schedules."""

    _target_: str = "verl.workers.config.McoreOptimizerConfig"

    optimizer: str = option("adam", choices=("adam", "sgd"))
    """Megatron's name of the optimizer: `adam`, whose weight decay is decoupled, or `sgd`."""

    lr_warmup_init: float = option(0.0, minimum=0)
    """Learning rate at the first warm-up step."""

    lr_decay_steps: int | None = option(None, minimum=0, used_if=MEGATRON_DECAYS)
    """Training steps until the learning rate reaches `min_lr`; null takes the whole run."""

    lr_decay_style: str = option(
        "constant", choices=("constant", "linear", "cosine", "inverse_square_root", "WSD")
    )
    """Shape of the learning rate after warm-up."""

    min_lr: float = option(0.0, minimum=0, used_if=MEGATRON_DECAYS)
    """The learning rate never falls below this."""

    weight_decay_incr_style: str = option(
        "constant",
        choices=("constant", "linear", "cosine"),
        used_if=never("weight decay begins and ends at weight_decay"),
    )
    """How weight decay changes over the run."""

    lr_wsd_decay_style: str = option(
        "exponential", choices=("constant", "exponential", "linear", "cosine"), used_if=WSD
    )
    """Shape of the last phase when `lr_decay_style` is WSD (warm-up, stable, decay)."""

    lr_wsd_decay_steps: int | None = option(None, minimum=0, used_if=WSD)
    """Training steps of that last phase."""

    use_checkpoint_opt_param_scheduler: bool = False
    """Continue the schedule stored in a checkpoint instead of the one configured here."""

    override_optimizer_config: dict[str, Any] = option(
        default_factory=dict,
        used_if=never(
            "the optimizer is our own, with masters in fp32; megatron.optimizer_offload keeps its "
            "state in CPU memory"
        ),
    )
    """Any field of Megatron's own optimizer configuration, for example `optimizer_cpu_offload`."""


@dataclass(kw_only=True)
class VeOmniOptimizerConfig(OptimizerConfig):
    """VeOmni's optimizer and its schedule."""

    _target_: str = "verl.workers.config.VeOmniOptimizerConfig"

    optimizer: str = "adamw"
    """VeOmni's name of the optimizer."""

    lr_min: float = option(0.0, minimum=0)
    """Learning rate at the end of the run."""

    lr_start: float = option(0.0, minimum=0)
    """Learning rate at the first warm-up step."""

    lr_decay_ratio: float = option(1.0, minimum=0, maximum=1)
    """Part of the run over which the learning rate falls."""

    lr_scheduler_type: str = option("cosine", choices=SCHEDULES)
    """Shape of the learning rate after warm-up."""

    override_optimizer_config: dict[str, Any] = option(default_factory=dict)
    """More keyword arguments for the optimizer."""
