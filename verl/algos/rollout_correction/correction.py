"""Importance weights, rejection and divergence metrics of a rollout, on tensors (B, T).

The policy that sampled and the one that is trained should be one policy. Another engine, another
precision or older weights make them differ. With r = pi_train / pi_rollout:

    token weight      w_it = r_it
    sequence weight   w_it = prod_t r_it      the same for every token of a sequence

Weights are truncated at a threshold (truncated importance sampling), which bounds the variance at
the price of a bias; they carry no gradient and multiply the policy loss. Rejection removes tokens
or sequences from the response mask on which the policies disagree too much. Its options are a level
and a divergence, as in `seq_mean_k1`:

    k1   -log r, bounded on both sides: "0.5_2.0" keeps 0.5 <= r <= 2.0; a single x means 1/x to x
    k2   (log r)^2 / 2, bounded above
    k3   r - 1 - log r, bounded above

For k1 the level combines logarithms: `seq_sum_k1` bounds the ratio of the sequence, `seq_mean_k1`
its geometric mean per token. Expectations of metrics are under the rollout policy; only sequences
with a kept token count, and everything outside the mask is ignored.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.utils.torch_functional import masked_sum


def correct_rollout(
    log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    *,
    rollout_is: str | None,
    rollout_is_threshold: float,
    rollout_is_batch_normalize: bool,
    rollout_rs: str | None,
    rollout_rs_threshold: str | float | None,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """(weights or None, mask, metrics named `rollout_corr/*`); all tensors are (B, T).

    Nothing here has a gradient. The weights are of everything that was sampled, also of what the
    mask then rejects.
    """
    log_prob = log_prob.detach()
    log_ratio = log_prob - rollout_log_prob
    metrics = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask)
    weights, mask = None, response_mask
    if rollout_is is not None:
        weights, found = compute_rollout_correction_weights(
            log_ratio, response_mask, rollout_is, rollout_is_threshold, rollout_is_batch_normalize
        )
        metrics |= found
    if rollout_rs is not None:
        mask, found = compute_rollout_rejection_mask(
            log_ratio, response_mask, rollout_rs, rollout_rs_threshold
        )
        metrics |= found
    return weights, mask, prefixed(metrics)


IS_LEVELS = ("token", "sequence")


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: float = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Weights (B, T), 0 outside the mask, and metrics, from `log_ratio` = log pi_train/pi_rollout.

    With `rollout_is_batch_normalize` the truncated weights are divided by their mean, over tokens
    or over sequences. The rows given must be the whole batch: no other process is asked.
    """
    if rollout_is not in IS_LEVELS:
        known = ", ".join(IS_LEVELS)
        raise ValueError(f"rollout_is is {rollout_is!r}; it must be null or one of: {known}")
    if not rollout_is_threshold > 0:
        raise ValueError(
            f"rollout_is_threshold is {rollout_is_threshold}; importance weights are truncated "
            "at it, so it must be greater than 0 (2.0 is usual)"
        )
    log_ratio = log_ratio.detach()
    if rollout_is == "sequence":
        log_ratio = sequence_sum(log_ratio, response_mask).expand_as(log_ratio)
    ratio = torch.where(response_mask.bool(), safe_exp(log_ratio), 0)
    weights = ratio.clamp(max=rollout_is_threshold)
    metrics = _weight_metrics(
        ratio, response_mask, rollout_is_threshold, by_sequence=rollout_is == "sequence"
    )
    if rollout_is_batch_normalize and metrics:
        mean = _mean_weight(weights, response_mask, rollout_is)
        weights = weights / mean
        metrics["rollout_is_batch_norm_factor"] = mean
    return weights, as_floats(metrics)


def _mean_weight(weights: Tensor, mask: Tensor, rollout_is: str) -> Tensor:
    if rollout_is == "token":
        return kept_tokens(weights, mask).mean()
    return kept_sequences(sequence_mean(weights, mask), mask).mean()


def _weight_metrics(
    ratio: Tensor, mask: Tensor, threshold: float, *, by_sequence: bool
) -> dict[str, Tensor]:
    """What the ratios are before truncation. Their std and effective sample size, which one outlier
    would decide, are of ratios within [1/threshold, threshold]. Sequence weights are counted once
    per sequence in the fractions outside of that.

    Nothing can be said of a batch without a token.
    """
    if not mask.any():
        return {}
    tokens = kept_tokens(ratio, mask)
    sequences = kept_sequences(sequence_mean(ratio, mask), mask)
    counted = sequences if by_sequence else tokens
    bounded = tokens.clamp(min(threshold, 1 / threshold), max(threshold, 1 / threshold))
    metrics = {
        **spread(tokens, "", correction=0),
        "std": bounded.std(correction=0),
        "eff_sample_size": bounded.mean() ** 2 / (bounded**2).mean(),
        "ratio_fraction_high": fraction(counted > threshold),
        "ratio_fraction_low": fraction(counted < 1 / threshold),
        **spread(sequences, "seq_", correction=1),
        "seq_max_deviation": (sequences - 1).abs().max(),
        "seq_fraction_high": fraction(sequences > threshold),
        "seq_fraction_low": fraction(sequences < 1 / threshold),
    }
    return {f"rollout_is_{name}": value for name, value in metrics.items()}


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: str | float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The mask (B, T) of what every criterion keeps, and metrics.

    `log_ratio` is log pi_train/pi_rollout; the two strings are explained in `criteria`.
    """
    log_ratio = torch.where(response_mask.bool(), log_ratio.detach(), 0)
    mask, metrics = response_mask, {}
    for criterion in parse_criteria(rollout_rs, rollout_rs_threshold):
        value = statistic(criterion, log_ratio, response_mask)
        kept = (value >= criterion.lower) & (value <= criterion.upper)
        mask = mask * kept.to(mask.dtype)
        metrics |= _criterion_metrics(criterion, value, kept, response_mask)
    metrics |= _masked_fractions("rollout_rs_", mask.bool(), response_mask)
    return mask, as_floats(metrics)


@dataclass(frozen=True)
class Criterion:
    """One option with its bounds; for k1 they are negative logarithms of ratios."""

    option: str
    lower: float
    upper: float

    @property
    def level(self) -> str:
        return self.option.rpartition("_")[0]

    @property
    def divergence(self) -> str:
        return self.option.rpartition("_")[2]


def statistic(criterion: Criterion, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """What the criterion bounds, for each token (B, T)."""
    if criterion.divergence == "k1":
        divergence = -log_ratio
    elif criterion.divergence == "k2":
        divergence = log_ratio**2 / 2
    else:
        divergence = safe_exp(log_ratio) - 1 - log_ratio
    if criterion.level == "token":
        return divergence
    combine = {"seq_sum": sequence_sum, "seq_mean": sequence_mean, "seq_max": sequence_max}
    return combine[criterion.level](divergence, mask).expand_as(log_ratio)


def _criterion_metrics(
    criterion: Criterion, value: Tensor, kept: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Of the divergence itself, in nats for k1: above 0 where training finds a token less likely.
    What is bounded by sequence is counted once per sequence in the fractions."""
    if not mask.any():
        return {}
    tokens = kept_tokens(value, mask)
    sequences = kept_sequences(sequence_mean(value, mask), mask)
    counted = tokens if criterion.level == "token" else sequences
    prefix = f"rollout_rs_{criterion.option}_"
    metrics = {
        **spread(tokens, prefix, correction=0),
        f"{prefix}fraction_high": fraction(counted > criterion.upper),
        f"{prefix}fraction_low": fraction(counted < criterion.lower),
        **spread(sequences, f"{prefix}seq_", correction=1),
        f"{prefix}seq_max_deviation": sequences.abs().max(),
        f"{prefix}seq_fraction_high": fraction(sequences > criterion.upper),
        f"{prefix}seq_fraction_low": fraction(sequences < criterion.lower),
    }
    return metrics | _masked_fractions(prefix, kept, mask)


def _masked_fractions(prefix: str, kept: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Of the tokens, how many were rejected; of the sequences, how many lost a token."""
    if not mask.any():
        return {}
    rejected = ~kept
    lost = (rejected & mask.bool()).any(-1, keepdim=True)
    return {
        f"{prefix}masked_fraction": fraction(kept_tokens(rejected, mask)),
        f"{prefix}seq_masked_fraction": fraction(kept_sequences(lost, mask)),
    }


SUPPORTED_ROLLOUT_RS_OPTIONS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)


def parse_criteria(rollout_rs: str, rollout_rs_threshold: str | float | None) -> list[Criterion]:
    """`"token_k1,seq_max_k3"` with `"0.5_2.0,0.01"`; one threshold may serve all options."""
    options = [option.strip() for option in rollout_rs.split(",")]
    for option in options:
        if option not in SUPPORTED_ROLLOUT_RS_OPTIONS:
            known = ", ".join(SUPPORTED_ROLLOUT_RS_OPTIONS)
            raise ValueError(
                f"rollout_rs names {option!r}; it must be a comma-separated list of: {known}"
            )
        if options.count(option) > 1:
            raise ValueError(f"rollout_rs ({rollout_rs!r}) names {option!r} twice")
    if rollout_rs_threshold is None:
        raise ValueError(
            f"rollout_rs is {rollout_rs!r} but rollout_rs_threshold is not set; give 'lower_upper' "
            "ratio bounds for k1 (as '0.5_2.0') and an upper bound for k2 and k3 (as '0.01')"
        )
    thresholds = [threshold.strip() for threshold in str(rollout_rs_threshold).split(",")]
    if len(thresholds) == 1:
        thresholds *= len(options)
    if len(thresholds) != len(options):
        raise ValueError(
            f"rollout_rs_threshold {rollout_rs_threshold!r} has {len(thresholds)} values for the "
            f"{len(options)} options of rollout_rs ({rollout_rs!r}); give one for all, or one each"
        )
    return [_criterion(*pair) for pair in zip(options, thresholds, strict=True)]


def _criterion(option: str, threshold: str) -> Criterion:
    if option.endswith("k1"):
        low, high = _ratio_bounds(option, threshold)
        return Criterion(option, -math.log(high), -math.log(low))
    upper = _number(option, threshold)
    if not upper > 0:
        raise ValueError(
            f"rollout_rs_threshold for {option} is {threshold!r}; it must be greater than 0"
        )
    return Criterion(option, -math.inf, upper)


def _ratio_bounds(option: str, threshold: str) -> tuple[float, float]:
    low_text, separator, high_text = threshold.partition("_")
    if separator:
        low, high = _number(option, low_text), _number(option, high_text)
    else:
        high = _number(option, threshold)
        low = 1 / high if high else 0.0
    if not 0 < low < high:
        raise ValueError(
            f"rollout_rs_threshold for {option} is {threshold!r}; it must be 'lower_upper' with "
            "0 < lower < upper (as '0.5_2.0'), or one number above 1 (2.0 means '0.5_2.0')"
        )
    return low, high


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"rollout_rs_threshold for {option} holds {text!r}, which is not a number; k1 takes "
            "'lower_upper' ratio bounds (as '0.5_2.0'), k2 and k3 one upper bound (as '0.01')"
        ) from None


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


LOG_RATIO_LIMIT = 20.0


def sequence_sum(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T) to (B, 1)."""
    return masked_sum(values, mask, -1)[:, None]


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T) to (B, 1); 0 for a sequence without a token."""
    return sequence_sum(values, mask) / mask.sum(-1, keepdim=True).clamp(min=1)


def sequence_max(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T) to (B, 1); -inf for a sequence without a token."""
    return torch.where(mask.bool(), values, -torch.inf).amax(-1, keepdim=True)


def safe_exp(log_values: Tensor) -> Tensor:
    """exp within e^-20 and e^20: finite, and far outside any threshold in use."""
    return log_values.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def kept_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T) to (number of tokens,)."""
    return values[mask.bool()]


def kept_sequences(values: Tensor, mask: Tensor) -> Tensor:
    """(B, 1) to (number of sequences with a token,)."""
    return values[:, 0][mask.bool().any(-1)]


def spread(values: Tensor, prefix: str, *, correction: int) -> dict[str, Tensor]:
    """Mean, max, min and standard deviation (over n - `correction`; 0 of a single value)."""
    return {
        f"{prefix}mean": values.mean(),
        f"{prefix}max": values.max(),
        f"{prefix}min": values.min(),
        f"{prefix}std": values.std(correction=min(correction, len(values) - 1)),
    }


def fraction(flags: Tensor) -> Tensor:
    return flags.double().mean()


def as_floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Read all metrics from the device at once."""
    if not metrics:
        return {}
    values = torch.stack([value.detach().double() for value in metrics.values()])
    return dict(zip(metrics, values.tolist(), strict=True))
