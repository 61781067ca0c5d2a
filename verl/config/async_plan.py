"""From the keys of an asynchronous run to its plan, and what must hold before a model is loaded.

    one_step_off    batch = data.train_batch_size, sync_every 1, staleness 1, lag 1
    fully_async     batch = require_batches x ppo_mini_batch_size, lag 1,
                    sync_every = trigger_parameter_sync_step, staleness = staleness_threshold
    colocate_async  sync_every 1, staleness = num_warmup_batches, lag 0
    separate_async  sync_every = parameter_sync_step, lag 1,
                    staleness = num_warmup_batches / sync_every

The schedule itself is in `verl.agent_loop.schedule`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from verl.config.correction import uncorrected_faults
from verl.config.faults import Fault, nearest_multiples, shown
from verl.config.roles import async_mode, rollout_traits

ROLLOUT = "actor_rollout_ref.rollout"
MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
CORRECTION = ("algorithm", "rollout_correction")
KV_AFTER_UPDATE = ("recompute", "keep")
IN_PROCESS = (
    "generation on ranks of its own (actor_rollout_ref.hybrid_engine=False with "
    f"{ROLLOUT}.nnodes=1 and {ROLLOUT}.n_gpus_per_node), or an engine in a process of its own "
    f"({ROLLOUT}.name=native_process)"
)


@dataclass(frozen=True, kw_only=True)
class AsyncPlan:
    """Which prompts may be generated when, and when an update reaches the rollout."""

    batch: int
    """Prompts of a training step."""

    sync_every: int = 1
    """Training steps per update of the rollout's weights."""

    staleness: float = 0.0
    """Prompts that may start ahead, as a share of those between two updates."""

    lag: int = 0
    """0: an update takes effect when its step is trained, generation pauses for it; 1: when the
    data of the next step is complete, training runs beside generation."""

    is_partial: bool = True
    """Rows go on across an update; else those that run end first."""

    kv_after_update: str = "recompute"
    """Whether rows that go on `recompute` their keys and values, or `keep` them."""

    reply_tokens: int = 64
    """Tokens that a reply of a tool or an environment counts for."""

    update_tokens: int = 0
    """Tokens between two updates, at least: what training beside generation counts for."""

    def __post_init__(self) -> None:
        rules = (
            ("batch", self.batch >= 1, "at least 1"),
            ("sync_every", self.sync_every >= 1, "at least 1"),
            ("staleness", self.staleness >= 0, "at least 0"),
            ("lag", self.lag in (0, 1), "0 or 1"),
            ("kv_after_update", self.kv_after_update in KV_AFTER_UPDATE, "recompute or keep"),
            ("reply_tokens", self.reply_tokens >= 0, "at least 0"),
            ("update_tokens", self.update_tokens >= 0, "at least 0"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"AsyncPlan.{name} is {vars(self)[name]!r}; it must be {rule}")

    def capacity(self, published_steps: int) -> int:
        """Prompts that may have started once the rollout's weights contain so many steps."""
        ahead = ceil(self.staleness * self.sync_every * self.batch - 1e-9)
        return self.batch * (published_steps + self.sync_every) + ahead

    @property
    def max_staleness(self) -> int:
        """Most steps between the weights that sampled a token and those that its step begins with:
        ceil((1 + staleness) sync_every) - 1."""
        return (self.capacity(0) - 1) // self.batch

    def is_due(self, step: int, frequency: int) -> bool:
        """Whether what is to be done every `frequency` steps is done at the update of `step`: some
        step that the update contains is such a step."""
        before = (step - 1) // self.sync_every * self.sync_every
        return step // frequency > before // frequency

    @property
    def is_on_policy(self) -> bool:
        return self.max_staleness == 0


def plan_of(config: Any) -> AsyncPlan | None:
    """The plan of a loaded RL configuration; None where training is synchronous."""
    mode, training, v1 = async_mode(config), config.async_training, config.trainer.v1
    rollout = config.actor_rollout_ref.rollout
    if mode == "sync":
        return None
    terms: dict[str, Any] = {"batch": config.data.train_batch_size, "lag": 1}
    if mode == "one_step_off":
        terms |= {"staleness": 1.0, "is_partial": rollout.partial_rollout}
    elif mode == "fully_async":
        terms |= {
            "batch": fully_async_batch(config),
            "sync_every": training.trigger_parameter_sync_step,
            "staleness": training.staleness_threshold,
            "is_partial": training.partial_rollout,
        }
    elif mode == "colocate_async":
        terms |= {"staleness": float(v1.colocate_async.num_warmup_batches), "lag": 0}
    else:
        every = v1.separate_async.parameter_sync_step
        terms |= {
            "sync_every": every,
            "staleness": v1.separate_async.num_warmup_batches / every,
        }
    plan = AsyncPlan(
        **terms,
        kv_after_update=rollout.get("kv_after_update", "recompute"),
        reply_tokens=training.reply_tokens,
    )
    if plan.is_on_policy and plan.lag:  # nothing is generated while an update is made
        plan = replace(plan, lag=0)
    if plan.lag and plan.is_partial:
        tokens = training.update_tokens
        if tokens is None:
            tokens = rollout.response_length // (plan.max_staleness + 1)
        plan = replace(plan, update_tokens=tokens)
    return plan


def fully_async_batch(config: Any) -> int:
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    return config.async_training.require_batches * mini


def async_values(
    config: Any, user_set: set[str]
) -> tuple[Mapping[tuple[str, ...], Any], list[str]]:
    """What the keys of an asynchronous run come to in the keys that every run has, with notices."""
    mode, training = async_mode(config), config.async_training
    if mode == "sync":
        return {}, []
    values, notices = fully_async_values(config, user_set) if mode == "fully_async" else ({}, [])
    correction = config.algorithm.rollout_correction
    if training.compute_prox_log_prob:
        if not correction.rollout_is and not correction.rollout_rs:
            values[(*CORRECTION, "rollout_is")] = "token"
    elif training.use_rollout_log_probs and not set_below(CORRECTION, user_set):
        values[(*CORRECTION, "bypass_mode")] = True
    return values, notices


def fully_async_values(
    config: Any, user_set: set[str]
) -> tuple[dict[tuple[str, ...], Any], list[str]]:
    """Length is counted in prompts, validations in updates, a batch in mini-batches."""
    rollout, batch = config.actor_rollout_ref.rollout, fully_async_batch(config)
    training = config.async_training
    values: dict[tuple[str, ...], Any] = {}
    notices = []
    if config.data.train_batch_size in (0, batch) or "data.train_batch_size" not in user_set:
        values["data", "train_batch_size"] = batch
        notices.append(
            f"a training step has {batch} prompts: async_training.require_batches "
            f"({training.require_batches}) times {MINI_BATCH}"
        )
    if rollout.total_rollout_steps is not None and "trainer.total_training_steps" not in user_set:
        steps = rollout.total_rollout_steps // batch
        values["trainer", "total_training_steps"] = steps
        notices.append(
            f"{ROLLOUT}.total_rollout_steps={rollout.total_rollout_steps} prompts are "
            f"trainer.total_training_steps={steps} of {batch}"
        )
    elif rollout.total_epochs is not None:
        values["trainer", "total_epochs"] = rollout.total_epochs
    if rollout.test_freq is not None:
        every = training.trigger_parameter_sync_step
        steps = rollout.test_freq * every if rollout.test_freq > 0 else -1
        values["trainer", "test_freq"] = steps
        notices.append(
            f"{ROLLOUT}.test_freq={rollout.test_freq} counts updates: trainer.test_freq={steps}"
        )
    return values, notices


def set_below(section: tuple[str, ...], user_set: set[str]) -> bool:
    return any(key.startswith(".".join(section) + ".") for key in user_set)


def async_faults(config: Any) -> Iterator[Fault]:
    """What an asynchronous run asks for that cannot be."""
    mode, v1 = config.async_training.mode, config.trainer.v1
    if mode != "sync" and config.trainer.use_v1 and v1.trainer_mode != "sync":
        text = (
            f"trainer.v1.trainer_mode is {shown(v1.trainer_mode)} and the command is {mode}; both "
            "choose how training runs: leave trainer.v1.trainer_mode at sync, or use "
            "verl.trainer.main_ppo"
        )
        yield Fault(text, ("trainer.v1.trainer_mode", "async_training.mode"))
        return
    if async_mode(config) == "sync":
        return
    yield from batch_faults(config)
    if config.data.train_batch_size < 1:
        return
    plan = plan_of(config)
    assert plan is not None
    yield from placing_faults(config, plan)
    yield from algorithm_faults(config, plan)
    if not plan.is_on_policy:
        yield from uncorrected_faults(config)


def batch_faults(config: Any) -> Iterator[Fault]:
    data, mode = config.data, async_mode(config)
    size, key = data.train_batch_size, "data.train_batch_size"
    if mode != "fully_async":
        if size < 1:
            yield Fault(f"{key} is {size}; it must be at least 1, the prompts of a step", (key,))
        return
    batch = fully_async_batch(config)
    if size != batch:
        text = (
            f"{key} is {size}; a step of a fully asynchronous run has {batch} prompts "
            f"(async_training.require_batches times {MINI_BATCH}): set {key}=0, or change these; "
            f"with this mini-batch the nearest would be "
            f"{nearest_multiples(size, of=config.actor_rollout_ref.actor.ppo_mini_batch_size)}"
        )
        yield Fault(text, (key, "async_training.require_batches"))
    if data.gen_batch_size not in (0, 1, size):
        text = (
            f"data.gen_batch_size is {data.gen_batch_size}; prompts of a fully asynchronous run "
            "start one by one: set data.gen_batch_size=1, or leave it out"
        )
        yield Fault(text, ("data.gen_batch_size",))
    prompts = config.actor_rollout_ref.rollout.total_rollout_steps
    if prompts is not None and prompts < batch:
        text = (
            f"{ROLLOUT}.total_rollout_steps is {prompts} prompts, less than the {batch} of one "
            f"training step (async_training.require_batches times {MINI_BATCH}): raise it"
        )
        yield Fault(text, (f"{ROLLOUT}.total_rollout_steps",))


def placing_faults(config: Any, plan: AsyncPlan) -> Iterator[Fault]:
    section, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    is_apart = not section.hybrid_engine or rollout_traits(rollout.name).has_own_process
    mode = async_mode(config)
    if plan.lag and not is_apart:
        text = (
            f"{ROLLOUT}.name is {shown(rollout.name)} with actor_rollout_ref.hybrid_engine=True: "
            f"it generates with the trainer's own weights and in its processes, so it cannot go on "
            f"while a step is trained; {mode} needs {IN_PROCESS}. On one set of devices use "
            "trainer.v1.trainer_mode=colocate_async with verl.trainer.main_ppo"
        )
        yield Fault(text, ("actor_rollout_ref.hybrid_engine", f"{ROLLOUT}.name"))
    if plan.lag and rollout.free_cache_engine and is_apart:
        text = (
            f"{ROLLOUT}.free_cache_engine is True; it puts the engines to sleep while a step is "
            f"trained, but in {mode} they generate meanwhile: set it to False"
        )
        yield Fault(text, (f"{ROLLOUT}.free_cache_engine",))
    lends = lending_key(config)
    if lends is not None and not plan.lag:
        text = (
            f"{lends} is True, but nothing is generated ahead, so the trainer and generation take "
            "turns anyway: set it to False, or generate ahead (num_warmup_batches or "
            "staleness_threshold above 0)"
        )
        yield Fault(text, (lends,))
    elif lends is not None and (
        section.hybrid_engine or not rollout_traits(rollout.name).is_builtin
    ):
        text = (
            f"{lends} is True, but {ROLLOUT}.name is {shown(rollout.name)} with "
            f"actor_rollout_ref.hybrid_engine={section.hybrid_engine}: devices are lent to the "
            f"built-in engine on ranks of its own; set hybrid_engine=False and {ROLLOUT}.name="
            f"native, or {lends}=False"
        )
        yield Fault(text, (lends, f"{ROLLOUT}.name"))
    if plan.kv_after_update == "keep" and not plan.lag and rollout.free_cache_engine:
        text = (
            f"{ROLLOUT}.kv_after_update is keep, but {ROLLOUT}.free_cache_engine is True: the keys "
            "and values are freed while a step is trained; set free_cache_engine=False, or "
            "kv_after_update=recompute"
        )
        yield Fault(text, (f"{ROLLOUT}.kv_after_update", f"{ROLLOUT}.free_cache_engine"))
    if not rollout.calculate_log_probs and not rollout_traits(rollout.name).is_builtin:
        text = (
            f"{ROLLOUT}.calculate_log_probs is False; asynchronous training needs the "
            "log-probabilities with which tokens were drawn, since their policy is gone: set it to "
            "True"
        )
        yield Fault(text, (f"{ROLLOUT}.calculate_log_probs",))


def lending_key(config: Any) -> str | None:
    """The key that lends devices of the trainer to generation, if it is set."""
    mode = async_mode(config)
    if mode == "separate_async" and config.trainer.v1.separate_async.hybrid_rollout.enable_switch:
        return "trainer.v1.separate_async.hybrid_rollout.enable_switch"
    if mode == "fully_async" and config.async_training.use_dynamic_resource_scheduling:
        return "async_training.use_dynamic_resource_scheduling"
    return None


def algorithm_faults(config: Any, plan: AsyncPlan) -> Iterator[Fault]:
    mode, algorithm = async_mode(config), config.algorithm
    if algorithm.filter_groups.enable:
        text = (
            f"algorithm.filter_groups.enable is True; how many prompts dynamic sampling draws for "
            f"a step is known only when they are graded, and {mode} starts those of later steps "
            "before: set it to False, or train synchronously (verl.trainer.main_ppo)"
        )
        yield Fault(text, ("algorithm.filter_groups.enable",))
    for name in ("filter_accuracy", "filter_truncate"):
        if config.data[name]:
            text = (
                f"data.{name} is True; which prompts a step prefers is known only when all are "
                f"graded, and {mode} starts those of later steps before: set it to False, or train "
                "synchronously"
            )
            yield Fault(text, (f"data.{name}",))
    if algorithm.adv_estimator == "remax":
        text = (
            f'algorithm.adv_estimator is "remax"; its greedy baselines are generated with the '
            f"weights of the step, after its responses, and {mode} has gone on by then: use grpo, "
            "rloo or another estimator, or train synchronously (verl.trainer.main_ppo)"
        )
        yield Fault(text, ("algorithm.adv_estimator",))
    if config.actor_rollout_ref.rollout.skip_rollout:
        text = (
            f"{ROLLOUT}.skip_rollout is True; dumps are of whole steps, and {mode} generates "
            "prompt by prompt: set it to False, or train synchronously (verl.trainer.main_ppo)"
        )
        yield Fault(text, (f"{ROLLOUT}.skip_rollout",))
    limit = config.trainer.v1.sampler.max_off_policy_threshold
    if mode in ("colocate_async", "separate_async") and plan.max_staleness > limit:
        text = (
            f"trainer.v1.sampler.max_off_policy_threshold is {limit}, but with "
            f"{plan.sync_every} steps per update and {plan.staleness * plan.sync_every:g} warm-up "
            f"batches responses can be {plan.max_staleness} steps old: raise it, or lower "
            f"trainer.v1.{mode}.num_warmup_batches"
        )
        yield Fault(text, ("trainer.v1.sampler.max_off_policy_threshold",))
