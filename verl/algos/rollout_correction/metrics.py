"""How far the policy that sampled the tokens is from the one that is trained.

They should be one policy. Another engine, another precision or older weights make them differ,
and these numbers say by how much. Expectations are over the sampled tokens, that is under the
rollout policy.
"""

from torch import Tensor

from verl.algos.rollout_correction.sequences import (
    as_floats,
    kept_sequences,
    kept_tokens,
    safe_exp,
    sequence_mean,
    sequence_sum,
)

PREFIX = "rollout_corr/"


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """Divergences and perplexities of the training policy and the rollout policy.

        kl            mean_t log(pi_rollout / pi_train)
        k3_kl         mean_t (r - 1 - log r),        r = pi_train / pi_rollout
        *_log_ppl     mean_i of l_i = -mean_t log pi;    *_ppl  mean_i exp(l_i)
        log_ppl_diff  l_train - l_rollout of each sequence: mean, mean of |.|, max, min
        ppl_ratio     mean_i exp(l_train - l_rollout)
        chi2_token    mean_t r^2 - 1;   chi2_seq  mean_i (prod_t r)^2 - 1

    Means over t are over all tokens, means over i over all sequences with a token. Without
    `rollout_log_prob` only the perplexity of the training policy is known; without a token nothing.
    """
    if not response_mask.any():
        return {}
    training = _log_perplexity(old_log_prob, response_mask)
    metrics = {"training_log_ppl": training.mean(), "training_ppl": safe_exp(training).mean()}
    if rollout_log_prob is not None:
        rollout = _log_perplexity(rollout_log_prob, response_mask)
        metrics |= {"rollout_log_ppl": rollout.mean(), "rollout_ppl": safe_exp(rollout).mean()}
        metrics |= _perplexity_gap(training - rollout)
        metrics |= _divergences(old_log_prob - rollout_log_prob, response_mask)
    return as_floats(metrics)


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """`compute_offpolicy_metrics` of the current policy, under the names `rollout_corr/*`."""
    metrics = compute_offpolicy_metrics(log_prob.detach(), rollout_log_prob, response_mask)
    return prefixed(metrics)


def prefixed(metrics: dict[str, float]) -> dict[str, float]:
    return {f"{PREFIX}{name}": value for name, value in metrics.items()}


def _log_perplexity(log_prob: Tensor, mask: Tensor) -> Tensor:
    return -kept_sequences(sequence_mean(log_prob, mask), mask)


def _perplexity_gap(difference: Tensor) -> dict[str, Tensor]:
    return {
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": safe_exp(difference).mean(),
    }


def _divergences(log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    tokens = kept_tokens(log_ratio, mask)
    sequences = kept_sequences(sequence_sum(log_ratio, mask), mask)
    return {
        "kl": -tokens.mean(),
        "k3_kl": (safe_exp(tokens) - 1 - tokens).mean(),
        "chi2_token": (safe_exp(tokens) ** 2).mean() - 1,
        "chi2_seq": (safe_exp(sequences) ** 2).mean() - 1,
    }
