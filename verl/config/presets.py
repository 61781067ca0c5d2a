"""Files that start from another one and change what a kind of run needs: asynchronous training.

A preset is a base file and the keys that differ. What it sets counts as set by the user, as in a
file of the user's own.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A file that extends `base`; `summary` is its first comment."""

    base: str
    summary: str
    values: dict[str, Any]


BESIDE = {
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.free_cache_engine": False,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
}
"""Generation on ranks of its own."""

ONE_STEP_OFF = BESIDE | {
    "async_training.mode": "one_step_off",
    "algorithm.rollout_correction.bypass_mode": True,
}
FULLY_ASYNC = BESIDE | {
    "async_training.mode": "fully_async",
    "async_training.use_rollout_log_probs": True,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.total_rollout_steps": 100,
    "actor_rollout_ref.rollout.total_epochs": 10,
    "actor_rollout_ref.rollout.test_freq": 1,
    "data.train_batch_size": 0,
    "data.gen_batch_size": 1,
}
TRANSFER_QUEUE = {"transfer_queue.enable": True}
KINDS = {
    "one_step_off_ppo": (
        "One step off: train on a batch while the next one is sampled.",
        ONE_STEP_OFF,
    ),
    "fully_async_ppo": ("Fully asynchronous: prompts stream, weights follow.", FULLY_ASYNC),
    "transfer_queue_ppo": ("Batches stay in the store of TransferQueue.", TRANSFER_QUEUE),
}

LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
PAIRS = {
    "actor_rollout_ref.rollout.n": 2,
    LOSS: "dpo",
    "algorithm.adv_estimator": None,
}
"""Two responses to a prompt, compared by their rewards."""

SPPO = {"actor_rollout_ref.rollout.n": 5, LOSS: "sppo", "algorithm.adv_estimator": "sppo"}
RECIPES = {
    "online_dpo": (
        "Online DPO: the best against the worst response to a prompt.",
        PAIRS | {"trainer.recipe": "online_dpo", "trainer.project_name": "online_dpo"},
    ),
    "spin": (
        "SPIN: DPO against the policy of the step before.",
        PAIRS | {"trainer.recipe": "spin", "trainer.project_name": "spin"},
    ),
    "sppo": (
        "SPPO: log-ratios that follow the reward above its baseline.",
        SPPO | {"trainer.project_name": "sppo"},
    ),
}

PRESETS: dict[str, Preset] = {
    f"{kind}{variant}_trainer": Preset(f"ppo{variant}_trainer", *told)
    for kind, told in KINDS.items()
    for variant in ("", "_megatron")
} | {f"{name}_trainer": Preset("ppo_trainer", *told) for name, told in RECIPES.items()}
