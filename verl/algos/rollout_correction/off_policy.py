"""How old the tokens of a batch are, what they cost, and rejection of those that are too old.

`policy_versions` (B, T) has the policy version that sampled each response token, -1 for others.
The age of a token is the number of training steps between the policy that sampled it and the one
that is about to be trained; it is counted per token, never at the start or the end of a response.
A trajectory is a session: all of its rows. Only trained tokens count.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from verl.algos.rollout_correction.correction import (
    as_floats,
    fraction,
    kept_tokens,
    safe_exp,
)
from verl.algos.sessions import session_numbers
from verl.protocol import DataProto
from verl.protocol.padded import POLICY_VERSIONS, SAMPLED_MASK

PREFIX = "training/off_policy"


def token_ages(
    batch: DataProto, version: int, step_versions: Sequence[int] | None = None
) -> Tensor:
    """(B, T) int64: the age of each trained token under the policy `version`; -1 for others.

    `step_versions` are the versions at the start of each training step, ascending and up to
    `version`: with several optimizer steps per training step a version counts more often than a
    step. Without it versions are steps.
    """
    versions, mask = batch.batch[POLICY_VERSIONS], batch.batch["response_mask"].bool()
    if step_versions is None:
        ages = version - versions
    else:
        starts = torch.tensor(step_versions, device=versions.device)
        ages = len(starts) - torch.searchsorted(starts, versions.contiguous(), right=True)
    is_impossible = mask & ((versions < 0) | (versions > version))
    if is_impossible.any():
        row, token = is_impossible.nonzero()[0].tolist()
        raise ValueError(
            f"the trained token {token} of row {row} has policy version "
            f"{int(versions[row, token])}; trained tokens are sampled by a policy, and the current "
            f"one is {version}"
        )
    return torch.where(mask, ages, -1)


def reject_stale(
    batch: DataProto,
    version: int,
    *,
    max_age: int | None,
    step_versions: Sequence[int] | None = None,
) -> tuple[DataProto, dict[str, float]]:
    """Take trajectories with a token older than `max_age` out of `response_mask`, and count them.

    They stay in the batch, and in the baseline of their prompt; without tokens they have no part in
    losses and denominators. Long answers are the old ones, so this is a bias towards short ones:
    `evicted_length_ratio` is their mean length over that of all. None rejects nothing.
    """
    count, older_name = f"{PREFIX}/evicted_samples", "fully_async/count/dropped_stale_samples"
    metrics = {count: 0.0, older_name: 0.0}
    if max_age is None:
        return batch, metrics
    mask = batch.batch["response_mask"]
    ages, numbers = token_ages(batch, version, step_versions), _sessions(batch)
    worst = _reduced(ages.amax(-1), numbers, "amax")
    is_stale = worst > max_age  # (S,)
    metrics[count] = metrics[older_name] = float(is_stale.sum())
    if is_stale.any():
        lengths = _reduced(mask.sum(-1), numbers, "sum").double()
        ratio = lengths[is_stale].mean() / lengths[lengths > 0].mean()
        metrics[f"{PREFIX}/evicted_length_ratio"] = ratio.item()
        batch.batch[SAMPLED_MASK] = mask
        batch.batch["response_mask"] = mask * (~is_stale[numbers])[:, None].to(mask.dtype)
    return batch, metrics


def off_policy_metrics(
    batch: DataProto,
    version: int,
    *,
    step_versions: Sequence[int] | None = None,
    is_proximal: bool = False,
    clip_range: tuple[float, float] = (0.2, 0.2),
) -> dict[str, float]:
    """How old the trained tokens are under the policy `version`, and how far that policy has moved.

        trajectory_spans             oldest minus youngest token of a trajectory, in steps
        trajectory_staleness         mean age of its tokens
        trajectory_staleness_worst   age of its oldest token
        age_<a>/token_ratio          share of the tokens of age a
        age_<a>/kl, .../ess          KL(pi_behave, pi_prox) by k3, and effective sample size of
                                     r = pi_prox / pi_behave, over tokens of age a

    The last two, and `ess` and `clipfrac` over all tokens (r outside `clip_range` around 1), need
    `old_log_probs` of the actor: `is_proximal`. In the update `actor/behaviour_*` says the same of
    the trained policy. `fully_async/*` are the names of the older asynchronous trainer.
    """
    ages = token_ages(batch, version, step_versions)
    is_counted = ages >= 0
    if not is_counted.any():
        return {}
    numbers = _sessions(batch)
    tokens = _reduced(is_counted.sum(-1), numbers, "sum")
    has_tokens = tokens > 0
    total = _reduced(torch.where(is_counted, ages, 0).sum(-1), numbers, "sum")
    oldest = _reduced(ages.amax(-1), numbers, "amax")[has_tokens]
    largest = int(ages.max()) + 1
    youngest = torch.where(is_counted, ages, largest).amin(-1)
    spans = oldest - _reduced(youngest, numbers, "amin")[has_tokens]
    measures = {
        "trajectory_spans": spans,
        "trajectory_staleness": total[has_tokens].double() / tokens[has_tokens],
        "trajectory_staleness_worst": oldest,
    }
    metrics: dict[str, Tensor] = {}
    for name, values in measures.items():
        values = values.double()
        metrics[f"{PREFIX}/{name}/mean"] = values.mean()
        metrics[f"{PREFIX}/{name}/max"] = values.max()
        metrics[f"{PREFIX}/{name}/min"] = values.min()
    metrics |= _by_age(batch, ages, is_proximal=is_proximal, clip_range=clip_range)
    metrics |= _older_names(batch, ages, oldest, spans, numbers)
    return as_floats(metrics) | {"fully_async/count/current_param_version": float(version)}


def _by_age(
    batch: DataProto, ages: Tensor, *, is_proximal: bool, clip_range: tuple[float, float]
) -> dict[str, Tensor]:
    is_counted = ages >= 0
    metrics: dict[str, Tensor] = {}
    log_r = None
    if is_proximal:
        log_r = (batch.batch["old_log_probs"] - batch.batch["rollout_log_probs"]).double()
        low, high = clip_range
        ratio = safe_exp(kept_tokens(log_r, is_counted))
        metrics[f"{PREFIX}/ess"] = _effective_share(ratio)
        metrics[f"{PREFIX}/clipfrac"] = fraction((ratio < 1 - low) | (ratio > 1 + high))
    for age in range(int(ages.max()) + 1):
        of_age = ages == age
        metrics[f"{PREFIX}/age_{age}/token_ratio"] = of_age.sum() / is_counted.sum()
        if log_r is not None and of_age.any():
            logs = kept_tokens(log_r, of_age)
            ratio = safe_exp(logs)
            metrics[f"{PREFIX}/age_{age}/kl"] = (ratio - 1 - logs).mean()
            metrics[f"{PREFIX}/age_{age}/ess"] = _effective_share(ratio)
    return metrics


def _older_names(
    batch: DataProto, ages: Tensor, oldest: Tensor, spans: Tensor, numbers: Tensor
) -> dict[str, Tensor]:
    """A sample is a prompt there, a trajectory one of its answers; a partial one saw an update."""
    uids: Any = batch.non_tensor_batch["uid"]
    is_stale_row = (ages.amax(-1) > 0).tolist()
    stale_prompts = {uid for uid, is_stale in zip(uids, is_stale_row, strict=True) if is_stale}
    is_partial = (spans > 0).double()
    return {
        "fully_async/count/stale_samples_processed": torch.tensor(float(len(stale_prompts))),
        "fully_async/count/stale_trajectory_processed": (oldest > 0).sum(),
        "fully_async/partial/total_partial_num": is_partial.sum(),
        "fully_async/partial/partial_ratio": is_partial.mean(),
        "fully_async/partial/max_partial_span": spans.max(),
    }


def _effective_share(weights: Tensor) -> Tensor:
    return weights.mean() ** 2 / (weights**2).mean()


def _sessions(batch: DataProto) -> Tensor:
    """(B,) the number of the session of each row."""
    numbers = session_numbers(batch)
    return torch.arange(len(batch)) if numbers is None else numbers


def _reduced(values: Tensor, numbers: Tensor, how: str) -> Tensor:
    """(B,) to (S,): the sum, largest or smallest value over the rows of each session."""
    numbers = numbers.to(values.device)
    result = values.new_zeros(int(numbers.max()) + 1)
    return result.scatter_reduce(0, numbers, values, how, include_self=how == "sum")
