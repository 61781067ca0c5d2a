"""What `actor.update_while_generating` asks of the rest of the configuration.

Passes over a finished group may run while others generate if nothing in them depends on rows that
are not there yet: advantages follow from the group alone, the loss of a row from the row, and there
is one optimizer step per batch. Everything else is refused here, by name.
"""

from collections.abc import Iterator
from typing import Any

from verl.config.faults import Fault, shown
from verl.config.names import Roles
from verl.config.ranks import world_size

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
KEY = f"{ACTOR}.update_while_generating"

GROUP_LOCAL_ESTIMATORS = (
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "opo",
    "rloo",
    "rloo_vectorized",
)
"""Advantages of a group follow from its own rewards."""

ROW_LOCAL_LOSSES = ("vanilla", "gpg", "cispo")
"""Losses of single rows, divided as `loss_agg_mode` says."""

SEQUENCE_LOSSES = ("gspo", "sapo", "geo_mean")
"""Losses of single rows, divided by the number of sequences whatever `loss_agg_mode` says."""

SEQUENCE_MODES = ("seq-mean-token-sum", "seq-mean-token-mean")


def overlap_faults(config: Any, roles: Roles) -> Iterator[Fault]:
    """Each key that stands against updating while generating."""
    if not config.actor_rollout_ref.actor.update_while_generating:
        return
    for key, value, is_fine, rule in requirements(config):
        if not is_fine:
            text = f"{key} is {shown(value)}; with {KEY}=True {rule}"
            yield Fault(text, (key, KEY))


def requirements(config: Any) -> Iterator[tuple[str, Any, bool, str]]:
    """Key, value, whether it will do, and the rule with a way out."""
    yield from step_requirements(config)
    yield from loss_requirements(config)
    yield from place_requirements(config)


def step_requirements(config: Any) -> Iterator[tuple[str, Any, bool, str]]:
    """One optimizer step per batch, on advantages that follow from a group alone."""
    actor, algorithm, prompts = (
        config.actor_rollout_ref.actor,
        config.algorithm,
        config.data.train_batch_size,
    )
    estimator = algorithm.adv_estimator
    yield (
        "algorithm.adv_estimator",
        estimator,
        estimator in GROUP_LOCAL_ESTIMATORS,
        "advantages must follow from the responses to one prompt: use "
        + ", ".join(GROUP_LOCAL_ESTIMATORS),
    )
    yield (
        f"{ACTOR}.ppo_epochs",
        actor.ppo_epochs,
        actor.ppo_epochs == 1,
        "a batch is gone over once: set it to 1",
    )
    yield (
        f"{ACTOR}.ppo_mini_batch_size",
        actor.ppo_mini_batch_size,
        actor.ppo_mini_batch_size == prompts,
        f"there is one optimizer step per batch: set it to data.train_batch_size, {prompts}",
    )
    filtered = algorithm.filter_groups.enable
    yield (
        "algorithm.filter_groups.enable",
        filtered,
        not filtered,
        "no prompt may be dropped after it was trained on: set it to False",
    )
    warmup = config.trainer.critic_warmup
    yield "trainer.critic_warmup", warmup, warmup == 0, "every step trains the actor: set it to 0"


def loss_requirements(config: Any) -> Iterator[tuple[str, Any, bool, str]]:
    """A loss that needs the row alone, and one count to divide by."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    loss, mode = actor.policy_loss.loss_mode, actor.loss_agg_mode
    known = (*ROW_LOCAL_LOSSES, *SEQUENCE_LOSSES)
    yield (
        f"{ACTOR}.policy_loss.loss_mode",
        loss,
        loss in known,
        f"a row's loss must follow from the row alone: use {', '.join(known)}",
    )
    yield (
        f"{ACTOR}.loss_agg_mode",
        mode,
        loss not in SEQUENCE_LOSSES or mode in SEQUENCE_MODES,
        f"all terms must divide by the same count, and {loss} divides by sequences: use "
        + " or ".join(SEQUENCE_MODES),
    )
    for key, is_used in (
        (f"{ACTOR}.use_kl_loss", actor.use_kl_loss),
        ("algorithm.use_kl_in_reward", config.algorithm.use_kl_in_reward),
        ("critic.enable", bool(config.critic.enable)),
        (f"{ACTOR}.calculate_sum_pi_squared", actor.calculate_sum_pi_squared),
        ("algorithm.rollout_correction.bypass_mode", correction.bypass_mode),
    ):
        yield key, is_used, not is_used, "groups get no further passes: set it to False"
    for name in ("rollout_is", "rollout_rs"):
        value = correction[name]
        rule = "every token is on-policy, and nothing is corrected: set it to null"
        yield f"algorithm.rollout_correction.{name}", value, value is None, rule


def place_requirements(config: Any) -> Iterator[tuple[str, Any, bool, str]]:
    """One device in this process, rewards per response."""
    rollout, trainer, reward = config.actor_rollout_ref.rollout, config.trainer, config.reward_model
    ranks, strategy = world_size(config), config.actor_rollout_ref.actor.strategy
    yield (
        f"{ACTOR}.strategy",
        strategy,
        strategy in ("fsdp", "fsdp2"),
        "the built-in training engine is needed: set it to fsdp",
    )
    if strategy in ("fsdp", "fsdp2"):
        dtype = config.actor_rollout_ref.actor.fsdp_config.dtype
        yield (
            f"{ACTOR}.fsdp_config.dtype",
            dtype,
            dtype not in ("fp16", "float16"),
            "passes cannot be repeated with another loss scale: use bf16 or fp32",
        )
    yield (
        "trainer.n_gpus_per_node",
        trainer.n_gpus_per_node,
        ranks == 1,
        f"the run has one device, not {ranks}: set it and trainer.nnodes to 1",
    )
    yield (
        "trainer.controller",
        trainer.controller,
        trainer.controller != "ray",
        "loops and engines share a process: use auto or local",
    )
    yield (
        "actor_rollout_ref.hybrid_engine",
        config.actor_rollout_ref.hybrid_engine,
        config.actor_rollout_ref.hybrid_engine,
        "the rollout uses the weights under training: set it to True",
    )
    yield (
        f"{ROLLOUT}.name",
        rollout.name,
        rollout.name == "native",
        "the built-in engine generates with the weights under training: use native",
    )
    rule = "there must be responses to wait for: set it to False"
    yield f"{ROLLOUT}.skip_rollout", rollout.skip_rollout, not rollout.skip_rollout, rule
    rule = "a group is scored when it has ended, by a reward function alone: set it to False"
    yield "reward_model.enable", reward.enable, not reward.enable, rule
    yield (
        "reward_model.use_reward_loop",
        reward.use_reward_loop,
        reward.use_reward_loop,
        "responses are scored before the whole batch is there: set it to True",
    )
