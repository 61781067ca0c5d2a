"""What a training step reports about its batch, its time and its speed.

Each metric says what it is a mean over:

| metrics | one count per |
|---|---|
| critic/score, critic/rewards | session that is not empty (sequence-weighted) |
| critic/advantages, critic/returns, critic/values, critic/vf_explained_var | trained token |
| num_turns, training/num_turns, tool_call_counts, variance_proxy | session |
| response_length, prompt_length, response/aborted_ratio | row |

A session is one row, unless its agent loop returned several. An aborted response has no tokens; it
says nothing about the policy, so it stays out of the scores and is counted in
`response/aborted_ratio`. Where nothing is left to measure the value is 0, never NaN. Metrics of the
update itself come from the workers; those of validation from `validation_metrics`, whose functions
are importable from here too.
"""

import resource
import sys
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from verl.algos.sessions import one_row_per_session, session_sums
from verl.protocol import DataProto
from verl.protocol.padded import POLICY_VERSIONS
from verl.trainer.ppo.validation_metrics import (
    bootstrap_metric,
    calc_maj_val,
    pass_at_k,
    process_validation_metrics,
)
from verl.utils.device import peak_memory
from verl.utils.metric import reduce_metrics
from verl.utils.recipe_helpers import compute_response_info

__all__ = [
    "bootstrap_metric",
    "calc_maj_val",
    "compute_data_metrics",
    "compute_throughout_metrics",
    "compute_timing_metrics",
    "compute_variance_proxy_metrics",
    "pass_at_k",
    "process_validation_metrics",
    "reduce_metrics",
]

# Stages whose time is also given per token: generation over the tokens it made, others over all.
_STAGES_PER_TOKEN = ("gen", "ref", "values", "adv", "update_critic", "update_actor")

_compute_response_info = compute_response_info


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """Scores, advantages and lengths of one training batch; see the table above."""
    tensors = batch.batch
    prompt_lengths, response_lengths = sequence_lengths(batch)  # (B,), (B,)
    is_answered = response_lengths > 0  # (B,)
    counts = session_sums(response_lengths, batch) > 0  # (S,)
    is_trained = tensors["response_mask"].bool()  # (B, T)
    scores = session_sums(tensors["token_level_scores"].sum(-1), batch)[counts]
    rewards = session_sums(tensors["token_level_rewards"].sum(-1), batch)[counts]
    returns = tensors["returns"][is_trained]
    metrics = {
        **mean_max_min("critic/score", scores),
        **mean_max_min("critic/rewards", rewards),
        **mean_max_min("critic/advantages", tensors["advantages"][is_trained]),
        **mean_max_min("critic/returns", returns),
    }
    if use_critic:
        values = tensors["values"][is_trained]
        metrics |= mean_max_min("critic/values", values)
        metrics["critic/vf_explained_var"] = explained_variance(values, returns)
    max_response_tokens = tensors["responses"].shape[-1]
    max_prompt_tokens = tensors["attention_mask"].shape[-1] - max_response_tokens
    answered = response_lengths[is_answered]
    metrics |= length_metrics("response_length", response_lengths, max_response_tokens)
    metrics |= length_metrics("response_length_non_aborted", answered, max_response_tokens)
    metrics["response/aborted_ratio"] = mean(~is_answered)
    metrics |= length_metrics("prompt_length", prompt_lengths, max_prompt_tokens)
    return metrics | conversation_metrics(one_row_per_session(batch).non_tensor_batch)


def conversation_metrics(columns: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Turns and tool calls, from the columns of the last row of each session."""
    counted = {
        "num_turns": columns.get("__num_turns__"),
        "training/num_turns": columns.get("__num_turns__"),
        "tool_call_counts": columns.get("tool_call_counts"),
    }
    outcomes = columns.get("tool_outcomes")
    if outcomes is not None and counted["tool_call_counts"] is None:
        counted["tool_call_counts"] = np.array([sum((found or {}).values()) for found in outcomes])
    metrics: dict[str, float] = {}
    for name, column in counted.items():
        if column is not None:
            metrics |= mean_max_min(name, torch.as_tensor(column.astype(float)))
    return metrics


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """`timing_s/<stage>` for every stage; milliseconds per token where the time grows with them."""
    prompt_lengths, response_lengths = sequence_lengths(batch)
    num_response_tokens = int(response_lengths.sum())
    num_tokens = num_response_tokens + int(prompt_lengths.sum())
    metrics = {f"timing_s/{stage}": float(seconds) for stage, seconds in timing_raw.items()}
    for stage in _STAGES_PER_TOKEN:
        tokens = num_response_tokens if stage == "gen" else num_tokens
        if stage in timing_raw and tokens:
            metrics[f"timing_per_token_ms/{stage}"] = timing_raw[stage] * 1000 / tokens
    return metrics


def compute_throughout_metrics(
    batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int
) -> dict[str, float]:
    """Tokens of the step, its seconds, and tokens per second and GPU."""
    num_tokens = int(sum(batch.meta_info["global_token_num"]))
    seconds = timing_raw["step"]
    return {
        "perf/total_num_tokens": num_tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": num_tokens / (seconds * n_gpus),
    }


def compute_variance_proxy_metrics(
    batch: DataProto, gradient_norm: float | None = None
) -> dict[str, float]:
    """How much of the policy gradient is signal, estimated without computing per-sample gradients.

    The squared norm of the score function of a token, under a softmax over the vocabulary, is

        w_t = 1 - 2 pi(y_t) + sum_v pi(v)^2         W_i = sum_t w_t  (times the square of the
                                                    importance weights, where there are any)

    so a response with mean advantage A_i has gradient power A_i^2 W_i. Over N responses:

        signal  = |mean gradient|^2                 from `gradient_norm`
        power   = mean_i(A_i^2 W_i)
        noise   = max(power - signal, 0) / (N - 1)  the variance of the mean gradient

    Sequence-weighted; empty where the batch lacks `sum_pi_squared`, `old_log_probs` or advantages.
    """
    tensors = batch.batch
    if not {"sum_pi_squared", "old_log_probs", "advantages"} <= set(tensors.keys()):
        return {}
    mask = tensors["response_mask"].to(torch.float32)  # (B, T)
    num_tokens = session_sums(mask.sum(-1), batch)  # (S,)
    is_trained = num_tokens > 0
    weights = 1 - 2 * tensors["old_log_probs"].exp() + tensors["sum_pi_squared"]  # (B, T)
    if "rollout_is_weights" in tensors.keys():  # noqa: SIM118
        weights = weights * tensors["rollout_is_weights"] ** 2
    score_power = session_sums((weights * mask).sum(-1), batch)[is_trained]
    advantages = session_sums((tensors["advantages"] * mask).sum(-1), batch)[is_trained]
    advantages = advantages / num_tokens[is_trained]
    power = mean(advantages**2 * score_power)
    metrics = {
        "variance_proxy/proxy2_total_power": power,
        "variance_proxy/expected_a_squared": mean(advantages**2),
        "variance_proxy/expected_w": mean(score_power),
    }
    if gradient_norm is not None:
        signal = float(gradient_norm) ** 2
        metrics["variance_proxy/proxy1_signal_strength"] = signal
        if len(advantages) > 1:
            noise = max(power - signal, 0.0) / (len(advantages) - 1)
            metrics["variance_proxy/proxy3_pure_noise"] = noise
    return metrics


def sequence_lengths(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Tokens of each prompt and each response, (B,) each; tool replies count as response."""
    info = _compute_response_info(batch)
    return info["prompt_length"], info["response_length"]


def length_metrics(name: str, lengths: Tensor, max_tokens: int) -> dict[str, float]:
    """Spread of the lengths, and the share that fills all positions and may have been cut."""
    return {**mean_max_min(name, lengths), f"{name}/clip_ratio": mean(lengths == max_tokens)}


def mean_max_min(name: str, values: Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return dict.fromkeys((f"{name}/mean", f"{name}/max", f"{name}/min"), 0.0)
    return {
        f"{name}/mean": mean(values),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - var(returns - values) / var(returns): 1 is perfect, 0 no better than the mean."""
    if values.numel() == 0:
        return 0.0
    unexplained = torch.var(returns - values, correction=0)
    return (1 - unexplained / (torch.var(returns, correction=0) + 1e-5)).item()


def mean(values: Tensor) -> float:
    return values.to(torch.float32).mean().item() if values.numel() else 0.0


GIGABYTE = 1024**3
KILOBYTES_PER_GIGABYTE = 1024**2


def batch_metrics(
    batch: DataProto,
    timing: Mapping[str, float],
    *,
    use_critic: bool,
    num_devices: int,
    grad_norm: float | None,
) -> dict[str, float]:
    """What a step that was made reports about its batch and its time."""
    return {
        **compute_data_metrics(batch, use_critic=use_critic),
        **compute_timing_metrics(batch, timing),
        **compute_throughout_metrics(batch, timing, num_devices),
        **compute_variance_proxy_metrics(batch, grad_norm),
        **memory_metrics(),
    }


def memory_metrics() -> dict[str, float]:
    """The most memory this process has used so far."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    per_gigabyte = GIGABYTE if sys.platform == "darwin" else KILOBYTES_PER_GIGABYTE
    metrics = {"perf/cpu_memory_used_gb": used / per_gigabyte}
    peak = peak_memory()
    if peak is not None:
        metrics["perf/max_memory_allocated_gb"] = peak[0] / GIGABYTE
        metrics["perf/max_memory_reserved_gb"] = peak[1] / GIGABYTE
    return metrics


def groups_without_spread(batch: DataProto) -> float:
    """Share of prompts whose responses all have the same score: they teach nothing.

    Where every prompt has one response, the batch as a whole takes the place of a group.
    """
    batch = one_row_per_session(batch)
    scores = batch.batch["token_level_scores"].sum(-1).tolist()
    values: dict[str, set[float]] = {}
    for uid, score in zip(batch.non_tensor_batch["uid"], scores, strict=True):
        values.setdefault(uid, set()).add(score)
    if len(values) == len(scores):
        return float(len(set(scores)) == 1)
    return sum(len(distinct) == 1 for distinct in values.values()) / len(values)


def calculate_debug_metrics(data: DataProto, version: int | None = None) -> dict[str, float]:
    """Compare the probabilities that rollout and training give to the sampled tokens.

    Token-weighted over the trained tokens, from `rollout_log_probs` and `old_log_probs`. Where
    tokens have policy versions, over those of `version`: two engines are compared here, not two
    policies.
    `rollout_probs_diff_valid` is 1 if there are such tokens; if it is 0 there is nothing else.
    The correlation is left out where it is undefined: one token, or no spread on either side.
    Without `response_mask` the end of `attention_mask` serves, and without both all tokens count.
    """
    if "response_mask" in data.batch.keys():  # noqa: SIM118
        mask = data.batch["response_mask"].bool()  # (B, T)
    elif "attention_mask" in data.batch.keys():  # noqa: SIM118
        num_positions = data.batch["old_log_probs"].shape[1]
        mask = data.batch["attention_mask"][:, -num_positions:].bool()
    else:
        mask = torch.ones_like(data.batch["old_log_probs"], dtype=torch.bool)
    if POLICY_VERSIONS in data.batch.keys() and version is not None:  # noqa: SIM118
        mask = mask & (data.batch[POLICY_VERSIONS] == version)
    rollout = data.batch["rollout_log_probs"][mask].exp().double()
    actor = data.batch["old_log_probs"][mask].exp().double()
    if rollout.numel() == 0:
        return {"training/rollout_probs_diff_valid": 0}
    difference = (rollout - actor).abs()
    metrics = {
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_max": difference.max().item(),
        "training/rollout_probs_diff_mean": difference.mean().item(),
        "training/rollout_probs_diff_std": difference.std(correction=0).item(),
    }
    spread = rollout.std(correction=0) * actor.std(correction=0)
    if spread > 0:
        covariance = ((rollout - rollout.mean()) * (actor - actor.mean())).mean()
        correlation = torch.clamp(covariance / spread, -1, 1).item()
        metrics["training/rollout_actor_probs_pearson_corr"] = correlation
    return metrics
