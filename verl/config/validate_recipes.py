"""Checks of recipes, of losses that compare whole sequences, and of the filter by accuracy."""

from collections.abc import Iterator
from typing import Any

from verl.config.faults import Fault, shown
from verl.config.roles import PAIR_RECIPES, SEQUENCE_LOSSES, runs_prime, uses_lora

ACTOR = "actor_rollout_ref.actor"
LOSS_KEY = f"{ACTOR}.policy_loss.loss_mode"


def preference_faults(config: Any) -> Iterator[Fault]:
    """The filter that prefers prompts by accuracy and length."""
    data, groups = config.data, config.algorithm.filter_groups
    for name in ("filter_accuracy", "filter_truncate"):
        if data[name] and groups.enable:
            text = (
                f"data.{name} and algorithm.filter_groups.enable are both on; each decides which "
                "prompts a step trains on: turn one off"
            )
            yield Fault(text, (f"data.{name}", "algorithm.filter_groups.enable"))
    if data.filter_accuracy and data.accuracy_lower_bound > data.accuracy_upper_bound:
        text = (
            f"data.accuracy_lower_bound ({data.accuracy_lower_bound:g}) must not be above "
            f"data.accuracy_upper_bound ({data.accuracy_upper_bound:g})"
        )
        yield Fault(text, ("data.accuracy_lower_bound",))


def prime_faults(config: Any) -> Iterator[Fault]:
    """What the recipe prime needs, and what it would not do."""
    if not runs_prime(config):
        return
    model, algorithm = config.reward_model, config.algorithm
    if not model.enable:
        text = (
            "reward_model.enable is False; trainer.recipe=prime trains an implicit reward model: "
            "set it to True and reward_model.model.path to a language model"
        )
        yield Fault(text, ("reward_model.enable",))
    if algorithm.adv_estimator != "rloo":
        text = (
            f"algorithm.adv_estimator is {shown(algorithm.adv_estimator)}; trainer.recipe=prime "
            "has an estimator of its own, leave-one-out for each reward: set it to rloo"
        )
        yield Fault(text, ("algorithm.adv_estimator",))
    if algorithm.use_kl_in_reward:
        text = (
            "algorithm.use_kl_in_reward is True; trainer.recipe=prime makes advantages from "
            "outcomes and token rewards alone: use actor_rollout_ref.actor.use_kl_loss"
        )
        yield Fault(text, ("algorithm.use_kl_in_reward",))
    if model.strategy not in ("fsdp", "fsdp2"):
        text = (
            f"reward_model.strategy is {shown(model.strategy)}; the implicit model of "
            "trainer.recipe=prime is trained with fsdp"
        )
        yield Fault(text, ("reward_model.strategy",))


def sequence_loss_faults(config: Any) -> Iterator[Fault]:
    """What the losses on whole sequences need, and what they have no place for."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    loss, n = actor.policy_loss.loss_mode, config.actor_rollout_ref.rollout.n
    if loss == "dro" and actor.policy_loss.dro_beta is None:
        key = f"{ACTOR}.policy_loss.dro_beta"
        text = f"{key} is null; {LOSS_KEY}=dro needs it: 0.05 is usual"
        yield Fault(text, (key,))
    if algorithm.adv_estimator == "gdpo":
        yield from decoupled_faults(algorithm)
    if loss not in SEQUENCE_LOSSES:
        return
    if actor.loss_agg_mode != "token-mean":
        text = (
            f"{ACTOR}.loss_agg_mode is {shown(actor.loss_agg_mode)}; {LOSS_KEY}={loss} is a mean "
            "over pairs or sequences and knows no other aggregation: leave it out"
        )
        yield Fault(text, (f"{ACTOR}.loss_agg_mode",))
    correction = algorithm.rollout_correction
    for name in ("rollout_is", "rollout_rs", "bypass_mode"):
        if correction[name]:
            key = f"algorithm.rollout_correction.{name}"
            text = (
                f"{key} is {shown(correction[name])}; {LOSS_KEY}={loss} has no importance weights "
                "and rejects nothing: leave it out"
            )
            yield Fault(text, (key,))
    if loss == "gvpo" and n < 2:
        key = "actor_rollout_ref.rollout.n"
        text = f"{key} is {n}; {LOSS_KEY}=gvpo compares the responses to a prompt: 2 or more"
        yield Fault(text, (key,))


def decoupled_faults(algorithm: Any) -> Iterator[Fault]:
    """GDPO normalises rewards one by one, so it must know them."""
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if not keys:
        key = "algorithm.gdpo_reward_keys"
        text = (
            f"{key} is empty; algorithm.adv_estimator=gdpo needs the names of the rewards that the "
            "reward function reports beside the score, as [correct,format]"
        )
        yield Fault(text, (key,))
    elif weights is not None and len(weights) != len(keys):
        key = "algorithm.gdpo_reward_weights"
        text = f"{key} has {len(weights)} weights for the {len(keys)} rewards of gdpo_reward_keys"
        yield Fault(text, (key,))
    if algorithm.use_kl_in_reward:
        key = "algorithm.use_kl_in_reward"
        text = (
            f"{key} is True; algorithm.adv_estimator=gdpo takes the rewards of gdpo_reward_keys, "
            f"which bear no KL: set {ACTOR}.use_kl_loss=True instead"
        )
        yield Fault(text, (key,))


def pair_faults(config: Any) -> Iterator[Fault]:
    """Recipes that make pairs go with the loss on pairs, and with nothing that wants advantages."""
    actor, recipe = config.actor_rollout_ref.actor, config.trainer.recipe
    estimator, loss = config.algorithm.adv_estimator, actor.policy_loss.loss_mode
    if recipe not in PAIR_RECIPES:
        if loss == "dpo":
            text = (
                f"{LOSS_KEY} is dpo, which needs pairs; run recipe.online_dpo.main_online_dpo "
                "or recipe.spin.main_spin (trainer.recipe), which make them"
            )
            yield Fault(text, (LOSS_KEY,))
        if estimator is None and recipe is None:
            key = "algorithm.adv_estimator"
            yield Fault(f"{key} is null; without a recipe that needs none, choose one", (key,))
        return
    needed = (
        (LOSS_KEY, loss, "dpo"),
        ("algorithm.adv_estimator", estimator, None),
        ("algorithm.use_kl_in_reward", config.algorithm.use_kl_in_reward, False),
        ("critic.enable", bool(config.critic.enable), False),
    )
    for key, value, only in needed:
        if value != only:
            text = (
                f"{key} is {shown(value)}; trainer.recipe={recipe} learns from pairs, so it must "
                f"be {'null' if only is None else shown(only)}"
            )
            yield Fault(text, (key,))
    yield from rollout_faults(config, recipe)
    if recipe == "spin" and config.trainer.ref_update_freq and not actor.dpo_reference_free:
        yield from moving_reference_faults(config)


def rollout_faults(config: Any, recipe: str) -> Iterator[Fault]:
    rollout, answers = config.actor_rollout_ref.rollout, config.data.chosen_key
    has_answers = recipe == "spin" and answers is not None
    if rollout.n < 2 and not has_answers:
        key = "actor_rollout_ref.rollout.n"
        text = f"{key} is {rollout.n}; a pair is two responses to a prompt, so it must be 2 or more"
        way = ", or set data.chosen_key to a column of answers" if recipe == "spin" else ""
        yield Fault(text + way, (key,))
    if has_answers and config.actor_rollout_ref.actor.use_rollout_log_probs:
        key = f"{ACTOR}.use_rollout_log_probs"
        text = f"{key} is True; the answers of data.chosen_key were not sampled: leave it out"
        yield Fault(text, (key,))


def moving_reference_faults(config: Any) -> Iterator[Fault]:
    """The policy can become the reference where both are the same kind of model."""
    key, way_out = "trainer.ref_update_freq", "set it to 0 to keep the first reference"
    frequency, path = config.trainer.ref_update_freq, config.actor_rollout_ref.ref.model.path
    if uses_lora(config):
        text = f"{key} is {frequency}; adapters are not merged into a reference yet: {way_out}"
        yield Fault(text, (key,))
    elif path is not None:
        text = (
            f"{key} is {frequency}, and actor_rollout_ref.ref.model.path is {shown(path)}, a model "
            f"of its own that the policy cannot replace: {way_out}"
        )
        yield Fault(text, (key,))
