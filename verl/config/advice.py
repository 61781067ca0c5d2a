"""Configurations that are allowed and probably not meant.

One sentence each, shown with the plan and at the start of a run; never a reason to refuse.
"""

from collections.abc import Iterator
from typing import Any

from verl.config.roles import GROUP_ESTIMATORS


def advice(config: Any) -> list[str]:
    return list(sentences(config))


def sentences(config: Any) -> Iterator[str]:
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    estimator = config.algorithm.adv_estimator
    if rollout.n == 1 and estimator in GROUP_ESTIMATORS:
        yield (
            f"algorithm.adv_estimator={estimator} compares the responses to a prompt with each "
            "other, but actor_rollout_ref.rollout.n is 1"
        )
    if config.algorithm.use_kl_in_reward and actor.use_kl_loss:
        yield (
            "the KL to the reference counts twice: in the reward (algorithm.use_kl_in_reward) and "
            "in the loss (actor_rollout_ref.actor.use_kl_loss)"
        )
    if rollout.val_kwargs.n > 1 and not rollout.val_kwargs.do_sample:
        yield (
            f"validation draws {rollout.val_kwargs.n} responses per prompt, all of them the same: "
            "set actor_rollout_ref.rollout.val_kwargs.do_sample=True and a temperature"
        )
    if config.trainer.save_freq < 1 and (config.trainer.total_training_steps or 2) > 1:
        yield "no checkpoint is saved: trainer.save_freq is not positive"
