"""Who earned the reward: from scores to token rewards, advantages and returns.

These functions connect a batch with the estimators in `verl.algos`. An estimator is called with
the arguments that its signature names, so a user's own one is written like the built-in ones and
asks for whatever it needs: an option of `compute_advantage` or a column of the batch.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verl.algos.advantages.returns import require_finite
from verl.algos.kl import KLController
from verl.algos.kl import kl_penalty as estimate_kl
from verl.algos.pf_ppo import compute_pf_ppo_reweight_data
from verl.algos.registry import AdvantageEstimator, get_adv_estimator_fn, plain_name
from verl.algos.sessions import estimate_by_session, session_sums
from verl.protocol.padded import SESSION_UID
from verl.utils.torch_functional import masked_mean

if TYPE_CHECKING:
    from verl.config.algorithm import AlgoConfig
    from verl.protocol import DataProto

ORIGIN = {
    "index": "the column `uid`",
    "values": "the column `values`, which a critic adds (critic.enable=True)",
    "reward_baselines": "the column `reward_baselines`, which adv_estimator=remax adds",
    "reward_parts": "what algorithm.gdpo_reward_keys names",
    "sum_pi_squared": "the column `sum_pi_squared`, which actor.calculate_sum_pi_squared=True adds",
}


def compute_response_mask(data: "DataProto") -> Tensor:
    """(B, T), 1 where a response token is not padding: the end of the attention mask."""
    num_tokens = data.batch["responses"].shape[1]
    return data.batch["attention_mask"][:, -num_tokens:]


def apply_kl_penalty(
    data: "DataProto", kl_ctrl: KLController, kl_penalty: str = "kl"
) -> tuple["DataProto", dict[str, float]]:
    """Charge each token for its distance from the reference policy.

        token_level_rewards = token_level_scores - coefficient * kl * response_mask

    The metrics tell the KL that was charged (mean over the tokens of a session, then over the
    sessions that have tokens) and the coefficient that was in force; after that the controller
    sees the KL and the number of those sessions.
    """
    _require(data, ("token_level_scores", "old_log_probs", "ref_log_prob"), "the KL penalty")
    mask = _response_mask(data)
    kl = estimate_kl(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty)
    kl = torch.where(mask.bool(), kl, 0.0)  # (B, T)
    coefficient = kl_ctrl.value
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - coefficient * kl
    has_tokens, mean_kl = mask.any(-1), masked_mean(kl, mask, axis=-1)
    if SESSION_UID in data.non_tensor_batch:
        tokens = session_sums(mask.sum(-1), data)
        has_tokens = tokens > 0
        mean_kl = session_sums(kl.sum(-1), data) / tokens.clamp(min=1)
    current_kl = masked_mean(mean_kl, has_tokens).item()
    kl_ctrl.update(current_kl=current_kl, n_steps=int(has_tokens.sum()))
    return data, {
        "actor/reward_kl_penalty": current_kl,
        "actor/reward_kl_penalty_coeff": coefficient,
    }


def compute_advantage(
    data: "DataProto",
    adv_estimator: AdvantageEstimator | str,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: "AlgoConfig | None" = None,
) -> "DataProto":
    """Add `advantages` and `returns` to the batch, by the estimator registered under that name.

    An estimator gets, by keyword, each argument it names: `token_level_rewards`, `response_mask`,
    `index` (the uids), `config`, `gamma`, `lam`, `num_repeat`, `norm_adv_by_std_in_grpo`, or any
    column of the batch (`reward_baselines`, `values`, `old_log_probs`, ...). One that takes
    `**kwargs` gets token_level_rewards, response_mask and config, and index and reward_baselines
    where the batch has them. A required argument that is none of these is a ValueError.

    Where sessions have several rows, an estimator sees one row per session (`verl.algos.sessions`).
    With `config.use_pf_ppo` (gae only) the batch is then drawn anew by score.
    """
    name = plain_name(adv_estimator)
    if config is not None and config.use_pf_ppo and name != AdvantageEstimator.GAE:
        raise ValueError(
            f"algorithm.use_pf_ppo=True works with algorithm.adv_estimator=gae only, not {name!r}"
        )
    _response_mask(data)
    _require(data, ("token_level_rewards",), f"advantage estimator {name!r}")
    require_finite(data.batch["token_level_rewards"])
    options = {
        "gamma": gamma,
        "lam": lam,
        "num_repeat": num_repeat,
        "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo,
        "config": config,
    }
    if config is not None and config.gdpo_reward_keys and name == AdvantageEstimator.GDPO:
        options["reward_parts"] = reward_parts(data, config.gdpo_reward_keys)
    estimate = get_adv_estimator_fn(name)
    arguments = _arguments(estimate, name, data, options)
    if SESSION_UID in data.non_tensor_batch:
        advantages, returns = estimate_by_session(estimate, arguments, data)
    else:
        advantages, returns = estimate(**arguments)
    data.batch["advantages"], data.batch["returns"] = advantages, returns
    if config is not None and config.use_pf_ppo:
        return compute_pf_ppo_reweight_data(
            data, config.pf_ppo.reweight_method, config.pf_ppo.weight_pow
        )
    return data


def reward_parts(data: "DataProto", names: Sequence[str]) -> np.ndarray:
    """(B, K): numbers that the grader reported for each response. In a session of several rows the
    last one speaks."""
    reported = data.meta_info.get("reward_extra_keys", [])
    for name in names:
        if name not in data.non_tensor_batch:
            raise ValueError(
                f"algorithm.gdpo_reward_keys has {name!r}, which the grader did not report; it "
                f"reported: {', '.join(reported) or 'nothing beside the score'}"
            )
    columns = [[as_number(value, name) for value in data.non_tensor_batch[name]] for name in names]
    return np.array(columns, dtype=np.float64).T


def as_number(value: Any, name: str) -> float:
    if isinstance(value, bool | int | float | np.number | np.bool_) and math.isfinite(value):
        return float(value)
    raise ValueError(
        f"the grader reported {name}={value!r}, which algorithm.gdpo_reward_keys takes for a "
        "reward; it must be a finite number for every response"
    )


def _arguments(
    estimate: Callable[..., Any], name: str, data: "DataProto", options: dict[str, Any]
) -> dict[str, Any]:
    """What `estimate` asks for, from the options and the columns of the batch."""
    known = {**data.non_tensor_batch, **dict(data.batch.items()), **options}
    # Groups are told apart by uid. The column `index` numbers the dataset's rows, and a row that is
    # drawn twice makes two groups.
    known.pop("index", None)
    if "uid" in data.non_tensor_batch:
        known["index"] = data.non_tensor_batch["uid"]
    chosen: dict[str, Any] = {}
    for parameter in inspect.signature(estimate).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            usual = ("token_level_rewards", "response_mask", "config", "index", "reward_baselines")
            chosen |= {key: known[key] for key in usual if key in known}
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif parameter.name in known and parameter.kind is not parameter.POSITIONAL_ONLY:
            chosen[parameter.name] = known[parameter.name]
        elif parameter.default is parameter.empty:
            raise ValueError(_missing(parameter, name, known))
    return chosen


def _missing(parameter: inspect.Parameter, name: str, known: dict[str, Any]) -> str:
    if parameter.kind is parameter.POSITIONAL_ONLY:
        return (
            f"advantage estimator {name!r} has the positional-only parameter {parameter.name!r}; "
            "estimators are called with keywords"
        )
    origin = ORIGIN.get(parameter.name, "an option of compute_advantage or a column of the batch")
    return (
        f"advantage estimator {name!r} requires {parameter.name!r}, which must be {origin}; "
        f"there is: {', '.join(sorted(known))}"
    )


def _response_mask(data: "DataProto") -> Tensor:
    """The batch's response mask, added from the attention mask where it is missing."""
    if "response_mask" not in data.batch:
        data.batch["response_mask"] = compute_response_mask(data)
    return data.batch["response_mask"]


def _require(data: "DataProto", columns: tuple[str, ...], purpose: str) -> None:
    missing = [column for column in columns if column not in data.batch]
    if missing:
        there = ", ".join(sorted(data.batch.keys()))
        raise ValueError(f"{purpose} needs the column {missing[0]!r}; the batch has: {there}")
