"""Checks of the filter that prefers prompts by accuracy, and of the recipe prime."""

from collections.abc import Iterator
from typing import Any

from verl.config.faults import Fault, shown
from verl.config.roles import runs_prime


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
