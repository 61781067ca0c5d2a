"""Does the algorithm's configuration make sense: names, KL, groups, off-policy correction."""

from collections.abc import Iterator
from typing import Any

from verl.config.faults import Fault, shown
from verl.config.roles import (
    AGENT_LOOPS,
    ESTIMATORS,
    POLICY_LOSSES,
    ROLLOUTS,
    STRATEGIES,
    TRACKERS,
    did_you_mean,
    has_own_loops,
    may_register_names,
    needs_critic,
    rollout_traits,
)

REJECTION_CRITERIA = (
    *(
        f"{level}_{kind}"
        for level in ("token", "seq_sum", "seq_mean")
        for kind in ("k1", "k2", "k3")
    ),
    "seq_max_k2",
    "seq_max_k3",
)
LOSS_KEY = "actor_rollout_ref.actor.policy_loss.loss_mode"


def algorithm_faults(config: Any, *, names_are_open: bool) -> Iterator[Fault]:
    if not names_are_open and not may_register_names(config):
        yield from name_faults(config)
    if not names_are_open and not has_own_loops(config, config):
        yield from loop_faults(config)
    yield from closed_name_faults(config)
    yield from estimator_faults(config)
    yield from correction_faults(config)


def loop_faults(config: Any) -> Iterator[Fault]:
    """The agent loop must be built in, unless user code may have registered it."""
    key = "actor_rollout_ref.rollout.agent.default_agent_loop"
    name = config.actor_rollout_ref.rollout.agent.default_agent_loop
    if name not in AGENT_LOOPS:
        text = (
            f"{key} is {shown(name)}; it must be one of: {did_you_mean(name, AGENT_LOOPS)}. A loop "
            "of your own is listed in actor_rollout_ref.rollout.agent.agent_loop_config_path"
        )
        yield Fault(text, (key,))


def name_faults(config: Any) -> Iterator[Fault]:
    """Estimator, loss and engine must be built in, unless user code may have registered them."""
    names = (
        ("algorithm.adv_estimator", config.algorithm.adv_estimator, ESTIMATORS),
        (LOSS_KEY, config.actor_rollout_ref.actor.policy_loss.loss_mode, POLICY_LOSSES),
        ("actor_rollout_ref.rollout.name", config.actor_rollout_ref.rollout.name, ROLLOUTS),
    )
    for key, name, known in names:
        if name not in known:
            text = (
                f"{key} is {shown(name)}; it must be one of: {did_you_mean(name, known)}. A name "
                "of your own is registered by a module in actor_rollout_ref.model.external_lib"
            )
            yield Fault(text, (key,))


def closed_name_faults(config: Any) -> Iterator[Fault]:
    """Names that nobody can add to."""
    strategy = config.actor_rollout_ref.actor.strategy
    if strategy not in STRATEGIES:
        key = "actor_rollout_ref.actor.strategy"
        text = (
            f"{key} is {shown(strategy)}; it must be one of: {did_you_mean(strategy, STRATEGIES)}"
        )
        yield Fault(text, (key,))
    critic = config.critic.strategy
    if needs_critic(config) and (critic == "megatron") != (strategy == "megatron"):
        text = (
            f"critic.strategy is {shown(critic)}; either both of critic and actor use megatron or "
            f"none, and actor_rollout_ref.actor.strategy is {shown(strategy)}"
        )
        yield Fault(text, ("critic.strategy",))
    for tracker in config.trainer.logger:
        if tracker not in TRACKERS:
            known = did_you_mean(tracker, TRACKERS)
            text = f"trainer.logger has {shown(tracker)}; trackers are: {known}"
            yield Fault(text, ("trainer.logger",))


def estimator_faults(config: Any) -> Iterator[Fault]:
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if estimator == "gae" and config.critic.enable is False:
        text = (
            "critic.enable is False, but algorithm.adv_estimator=gae needs a critic; "
            "use algorithm.adv_estimator=grpo (or another without critic), or remove critic.enable"
        )
        yield Fault(text, ("critic.enable", "algorithm.adv_estimator"))
    if config.algorithm.use_pf_ppo and estimator in ESTIMATORS and estimator != "gae":
        text = (
            f"algorithm.use_pf_ppo is True, but algorithm.adv_estimator is {shown(estimator)}; "
            "only gae draws the batch again: set one of them the other way"
        )
        yield Fault(text, ("algorithm.use_pf_ppo", "algorithm.adv_estimator"))
    if estimator == "grpo_passk" and n < 2:
        text = (
            f"actor_rollout_ref.rollout.n is {n}; algorithm.adv_estimator=grpo_passk compares the "
            "two best responses to a prompt, so it must be at least 2"
        )
        yield Fault(text, ("actor_rollout_ref.rollout.n",))
    sums = config.actor_rollout_ref.actor.calculate_sum_pi_squared
    if estimator.endswith("optimal_token_baseline") and not sums:
        key = "actor_rollout_ref.actor.calculate_sum_pi_squared"
        text = f"{key} is False; algorithm.adv_estimator={estimator} needs it: set it to True"
        yield Fault(text, (key,))
    groups = config.algorithm.filter_groups
    if groups.enable and groups.metric is None:
        text = (
            "algorithm.filter_groups.metric is null; with algorithm.filter_groups.enable=True it "
            "must say what has to differ: acc, score, seq_reward or seq_final_reward"
        )
        yield Fault(text, ("algorithm.filter_groups.metric",))


def correction_faults(config: Any) -> Iterator[Fault]:
    correction = config.algorithm.rollout_correction
    path = "algorithm.rollout_correction"
    rollout = config.actor_rollout_ref.rollout
    is_on = correction.rollout_is or correction.rollout_rs or correction.bypass_mode
    always_given = rollout_traits(rollout.name).is_builtin
    if is_on and not rollout.calculate_log_probs and not always_given:
        key = "actor_rollout_ref.rollout.calculate_log_probs"
        text = f"{key} is False; {path} compares with the rollout's log-probs, so set it to True"
        yield Fault(text, (key,))
    if rollout.exact and rollout.name != "native":
        key = "actor_rollout_ref.rollout.exact"
        text = (
            f'{key} is True, but rollout.name is "{rollout.name}"; only the built-in engine shares '
            "the trainer's arithmetic: set rollout.name=native or rollout.exact=False"
        )
        yield Fault(text, (key, "actor_rollout_ref.rollout.name"))
    criteria = [name.strip() for name in (correction.rollout_rs or "").split(",") if name.strip()]
    for name in criteria:
        if name not in REJECTION_CRITERIA:
            known = did_you_mean(name, REJECTION_CRITERIA)
            text = f"{path}.rollout_rs has {shown(name)}; criteria are: {known}"
            yield Fault(text, (f"{path}.rollout_rs",))
    bounds = correction.rollout_rs_threshold
    count = len(str(bounds).split(",")) if bounds is not None else 0
    if criteria and count not in (1, len(criteria)):
        text = (
            f"{path}.rollout_rs_threshold is {shown(bounds)}; it must have one bound for all, or "
            f"one for each of the {len(criteria)} criteria of rollout_rs, separated by commas"
        )
        yield Fault(text, (f"{path}.rollout_rs_threshold",))
