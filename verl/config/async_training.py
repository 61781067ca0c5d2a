"""Training on responses of earlier policies: the keys of both generations of asynchronous commands.

`async_training.*` belongs to the commands of their own (one step off, fully asynchronous),
`trainer.v1.*` to `main_ppo`. `verl.config.async_plan` turns either into an `AsyncPlan`; these
classes only hold the options.
"""

from dataclasses import dataclass
from typing import Any

from verl.config.base import Absent, BaseConfig, When, never, option
from verl.config.roles import FULLY_ASYNC, async_mode

ASYNCHRONOUS = When(lambda here, run: async_mode(run) != "sync", "training is synchronous")
SEPARATE = When(
    lambda here, run: async_mode(run) == "separate_async", "trainer_mode is not separate_async"
)
LENDS = When(
    lambda here, run: async_mode(run) == "fully_async" and here.use_dynamic_resource_scheduling,
    "async_training.use_dynamic_resource_scheduling is False: no devices are lent",
)
SWITCHES = When(
    lambda here, run: async_mode(run) == "separate_async" and here.enable_switch,
    "hybrid_rollout.enable_switch is False: no devices are lent",
)
ADAPTS = When(
    lambda here, run: SWITCHES.holds(here, run) and here.adaptive_switch_threshold,
    "enable_switch or adaptive_switch_threshold is False: the threshold stays",
)
BY_SCHEDULE = "which prompts a step trains on follows from the schedule (docs/async.md)"


@dataclass(kw_only=True)
class AsyncTrainingConfig(BaseConfig):
    """Asynchronous training by a command of its own."""

    mode: str = option("sync", choices=("sync", "one_step_off", "fully_async"))
    """What the command is: the commands under `verl.experimental` set it. `sync` leaves the choice
    to `trainer.v1.trainer_mode`."""

    staleness_threshold: float = option(0.1, minimum=0, used_if=FULLY_ASYNC)
    """Prompts generated ahead of the weights they will train, as a share of those of one update; 0
    generates none ahead."""

    trigger_parameter_sync_step: int = option(4, minimum=1, used_if=FULLY_ASYNC)
    """Training steps between updates of the rollout's weights."""

    require_batches: int = option(1, minimum=1, used_if=FULLY_ASYNC)
    """Mini-batches (`actor.ppo_mini_batch_size` prompts) of a training step."""

    partial_rollout: bool = option(True, used_if=FULLY_ASYNC)
    """Responses go on with the new weights across an update; off, those that run end first."""

    use_rollout_log_probs: bool = option(False, used_if=ASYNCHRONOUS)
    """Take ratios against the log-probabilities that tokens were sampled with; sets
    `algorithm.rollout_correction.bypass_mode` unless that is set."""

    compute_prox_log_prob: bool = option(False, used_if=ASYNCHRONOUS)
    """Compute the log-probabilities of a proximal policy, the actor before the step; sets
    `algorithm.rollout_correction.rollout_is=token` unless that section chooses weights."""

    reply_tokens: int = option(64, minimum=0, used_if=ASYNCHRONOUS)
    """What a reply of a tool or an environment counts for in the schedule, in tokens."""

    update_tokens: int | None = option(
        None,
        minimum=0,
        used_if=When(
            lambda here, run: async_mode(run) not in ("sync", "colocate_async"),
            "training is not beside generation: an update takes no time in the schedule",
        ),
    )
    """What an update counts for in the schedule where training runs beside generation, in tokens
    of every row; null divides the longest response by the steps that may be in flight."""

    use_trainer_do_validate: bool = option(
        False, used_if=never("the rollout's engines always validate")
    )
    """Accepted for older scripts; the rollout's engines always validate."""

    use_dynamic_resource_scheduling: bool = option(False, used_if=FULLY_ASYNC)
    """While the trainer waits for responses, its devices generate too, with engines and weights of
    their own there; needs generation on ranks of its own."""

    dynamic_schedule_policy: str = option(
        "default", choices=("default",), used_if=never("there is one policy, `default`")
    )
    """`default` lends when few of the responses that are waited for have ended."""

    dynamic_schedule_deactivate_ratio: float = option(0.3, minimum=0, maximum=1, used_if=LENDS)
    """Devices are lent while at most this share of them has ended."""

    dynamic_schedule_enable_rebalance: bool = option(True, used_if=LENDS)
    """Spread the responses that run over all engines when devices are lent; off, lent engines get
    those that begin later."""

    concurrent_samples_per_replica: int = option(
        16, minimum=1, used_if=never("rollout.max_num_seqs bounds what an engine runs at once")
    )
    """Accepted for newer scripts; `rollout.max_num_seqs` bounds what an engine runs at once."""


@dataclass(kw_only=True)
class ColocateAsyncConfig(BaseConfig):
    """Generation pauses for each update and goes on with the new weights, on the same devices."""

    num_warmup_batches: int = option(
        1,
        minimum=0,
        used_if=When(
            lambda here, run: async_mode(run) == "colocate_async",
            "trainer_mode is not colocate_async",
        ),
    )
    """Batches generated ahead of the weights they will train; 0 is on-policy."""


@dataclass(kw_only=True)
class HybridRolloutConfig(BaseConfig):
    """Devices of the trainer lent to generation."""

    enable_switch: bool = option(False, used_if=SEPARATE)
    """While the trainer waits for responses, its devices generate too, with engines and weights of
    their own there; needs generation on ranks of its own."""

    switch_threshold_ratio: float = option(0.4, minimum=0, maximum=1, used_if=SWITCHES)
    """Devices are lent if at most this share of the responses that are waited for has ended."""

    adaptive_switch_threshold: bool = option(True, used_if=SWITCHES)
    """Raise the share after a wait that was longer than switching takes, lower it after others."""

    switch_threshold_step_up: float = option(0.05, minimum=0, used_if=ADAPTS)
    """How far it rises at a time."""

    switch_threshold_step_down: float = option(0.03, minimum=0, used_if=ADAPTS)
    """How far it falls at a time."""

    switch_threshold_release_steps: int = option(2, minimum=1, used_if=ADAPTS)
    """Waits in a row that were too short before it falls."""

    switch_cost_window_size: int = option(3, minimum=1, used_if=ADAPTS)
    """Switches whose seconds are averaged."""


@dataclass(kw_only=True)
class SeparateAsyncConfig(BaseConfig):
    """Generation on ranks of its own, beside training."""

    num_warmup_batches: int = option(
        1,
        minimum=0,
        used_if=SEPARATE,
    )
    """Batches generated ahead of the weights they will train."""

    parameter_sync_step: int = option(
        4,
        minimum=1,
        used_if=SEPARATE,
    )
    """Training steps between updates of the rollout's weights."""

    hybrid_rollout: HybridRolloutConfig = option(default_factory=HybridRolloutConfig)
    """Devices of the trainer lent to generation."""


@dataclass(kw_only=True)
class CustomSamplerConfig(BaseConfig):
    """A class of your own that chooses the prompts of a step."""

    path: str | None = option(None, absent=Absent(f"{BY_SCHEDULE}: leave it out"))
    """File that holds the class."""

    name: str | None = option(None, used_if=never(BY_SCHEDULE))
    """Name of the class."""


@dataclass(kw_only=True)
class V1SamplerConfig(BaseConfig):
    """Which finished prompts a step trains on."""

    max_off_policy_threshold: int = option(
        8,
        minimum=0,
        used_if=When(
            lambda here, run: async_mode(run) in ("colocate_async", "separate_async"),
            "trainer_mode is sync: no prompt is stale",
        ),
    )
    """Most updates between the weights that sampled a response and those it trains. A schedule that
    could exceed it is refused before the run."""

    max_off_policy_strategy: str = option(
        "drop",
        choices=("drop", "wait"),
        used_if=never("the schedule never lets a prompt become too stale, so none is dropped"),
    )
    """Accepted for newer scripts: nothing becomes too stale, so nothing is dropped."""

    sync_refill_failed_groups: bool = option(
        False, absent=Absent("a prompt that failed is counted, and no other takes its place")
    )
    """Draw further prompts for those that failed."""

    custom_sampler: CustomSamplerConfig = option(default_factory=CustomSamplerConfig)
    """A class of your own that chooses the prompts of a step."""

    sampler_kwargs: dict[str, Any] = option(default_factory=dict, used_if=never(BY_SCHEDULE))
    """Arguments of that class."""


@dataclass(kw_only=True)
class V1Config(BaseConfig):
    """Synchronous or asynchronous training, as newer scripts choose it."""

    trainer_mode: str = option(
        "sync",
        choices=("sync", "colocate_async", "separate_async"),
        used_if=When(lambda here, run: run.trainer.use_v1, "trainer.use_v1 is False"),
    )
    """`colocate_async`: one set of devices, responses go on across updates; `separate_async`:
    generation on ranks of its own, beside training."""

    sync: dict[str, Any] = option(default_factory=dict, used_if=never("it has no options"))
    """Options of synchronous training: none."""

    colocate_async: ColocateAsyncConfig = option(default_factory=ColocateAsyncConfig)
    """Generation pauses for each update and goes on with the new weights, on the same devices."""

    separate_async: SeparateAsyncConfig = option(default_factory=SeparateAsyncConfig)
    """Generation on ranks of its own, beside training."""

    sampler: V1SamplerConfig = option(default_factory=V1SamplerConfig)
    """Which finished prompts a step trains on."""
