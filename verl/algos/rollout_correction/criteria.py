"""What `rollout_rs` and `rollout_rs_threshold` say, read once and checked.

An option is a level and a divergence, as in `seq_mean_k1`. With r = pi_train / pi_rollout:

    k1   log r, bounded on both sides: "0.5_2.0" keeps 0.5 <= r <= 2.0; a single x means 1/x to x
    k2   (log r)^2 / 2, bounded above
    k3   r - 1 - log r, bounded above

For k1 the level combines logarithms: `seq_sum_k1` bounds the ratio of the sequence,
`seq_mean_k1` its geometric mean per token.
"""

import math
from dataclasses import dataclass

SUPPORTED_ROLLOUT_RS_OPTIONS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)


@dataclass(frozen=True)
class Criterion:
    """One option with its bounds; for k1 they are logarithms of ratios."""

    option: str
    lower: float
    upper: float

    @property
    def level(self) -> str:
        return self.option.rpartition("_")[0]

    @property
    def divergence(self) -> str:
        return self.option.rpartition("_")[2]


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
        return Criterion(option, math.log(low), math.log(high))
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
