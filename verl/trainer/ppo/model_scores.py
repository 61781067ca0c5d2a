"""Where the scores of a reward model enter a batch, and who may change them.

reward_model.enable alone       the model's score is the reward (`rm_scores`)
with a function per response    the function decides; it finds the model's score in
                                `extra_info["rm_score"]`
with a function over the batch, or a manager of one's own
                                it decides; `rm_scores` is in the batch it is given
"""

import inspect
from typing import Any

import numpy as np

from verl.config.ppo import PPOConfig
from verl.config.reward import FSDPRewardModelConfig
from verl.protocol import DataProto
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.reward_functions import WholeBatchReward, takes_whole_batch

NATIVE_ENGINES = ("native", "hf")
MANAGERS_THAT_ASK_A_FUNCTION = (
    "batch", "dapo", "judge", "limited", "prime", "rate_limited", "remote",
)  # fmt: skip


def add_model_scores(batch: DataProto, found: DataProto, *, as_extra_info: bool) -> DataProto:
    """The batch with what the reward model said about it."""
    if not as_extra_info:
        return batch.union(found)
    scores = found.batch["rm_scores"].sum(-1).tolist()
    own = batch.non_tensor_batch.get("extra_info", [None] * len(batch))
    extras = np.empty(len(batch), dtype=object)
    extras[:] = [
        {**(extra or {}), "rm_score": score} for extra, score in zip(own, scores, strict=True)
    ]
    batch.non_tensor_batch["extra_info"] = extras
    return batch


def is_asked_per_response(config: PPOConfig, reward_fn: Any) -> bool:
    """Whether a function of the user's looks at each response, and at the model's score of it."""
    return config.custom_reward_function.path is not None and not isinstance(
        reward_fn, WholeBatchReward
    )


def asks_over_http(config: PPOConfig) -> bool:
    """Whether a function of the user's takes the address of a served reward model."""
    function = get_custom_reward_fn(config) if config.reward_model.enable else None
    if function is None or takes_whole_batch(function)[0]:
        return False
    parameters = inspect.signature(function).parameters
    return "reward_router_address" in parameters


def validates_with_model(config: PPOConfig, batch: DataProto) -> bool:
    """Whether held-out responses go to the model too.

    Where the user's code decides, it is given what training gives it. Otherwise rows with an answer
    are graded by rule, and the model scores those whose `reward_model.style` is `model`.
    """
    manager = config.reward_manager
    is_users_own = manager.source == "importlib" or manager.name != "naive"
    if is_users_own or config.custom_reward_function.path is not None:
        return True
    rows = batch.non_tensor_batch.get("reward_model", [])
    return any(row.get("style") == "model" for row in rows)


def refuse_unsuited_reward_model(config: PPOConfig) -> None:
    """Settings of `reward_model` that are valid and that one process cannot honour."""
    model = config.reward_model
    if not isinstance(model, FSDPRewardModelConfig):
        raise ValueError(
            f"reward_model.strategy is {model.strategy!r}; the reward model runs on the built-in "
            "engine: set reward_model.strategy=fsdp"
        )
    if model.enable_resource_pool and asks_over_http(config):
        raise ValueError(
            "reward_model.enable_resource_pool is True and custom_reward_function asks the model "
            "through reward_router_address; the model is served from the trainer's process only: "
            "set reward_model.enable_resource_pool=False"
        )
    if model.rollout.name not in NATIVE_ENGINES:
        raise ValueError(
            f"reward_model.rollout.name is {model.rollout.name!r}; the reward model runs in this "
            "process: set reward_model.rollout.name=native, or ask a served one from a "
            "custom_reward_function"
        )
    manager = config.reward_manager
    if manager.name == "model" and config.custom_reward_function.path is not None:
        raise ValueError(
            "reward_manager.name is 'model' and custom_reward_function.path is set; that manager "
            "asks no function: remove one of the two"
        )
    is_built_in = manager.source == "register" and manager.name in MANAGERS_THAT_ASK_A_FUNCTION
    if is_built_in and config.custom_reward_function.path is None:
        raise ValueError(
            f"reward_manager.name is {manager.name!r} and reward_model.enable is True; without a "
            "custom_reward_function the model's score is the reward and that manager would do "
            "nothing: set reward_manager.name=naive, or give it a function, which finds the "
            'model\'s score in extra_info["rm_score"]'
        )
