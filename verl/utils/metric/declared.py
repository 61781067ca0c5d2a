"""Every metric a run reports, once: name, unit, how parts of it combine, one sentence.

Parts are what micro-batches, optimizer steps and ranks report of one metric. How they become one
number follows from this table, never from how a name ends. `<stage>` and the like stand for what a
run fills in. docs/metrics.md is made from here: `python -m verl.utils.metric.declared`.

A metric that a user's own loss or recipe reports is averaged over response tokens, unless
`declare` says otherwise.
"""

import re
from functools import cache
from pathlib import Path

from verl.utils.metric.of_learning import REWARDS, UPDATE
from verl.utils.metric.utils import (
    MAX,
    MEAN,
    MIN,
    SUM,
    AggregationType,
    DeclaredMetric,
    section,
    spread,
)

SECTIONS = (
    UPDATE,
    REWARDS,
    section(
        "Generation",
        *spread("response_length", "tokens", "response length"),
        ("response_length/clip_ratio", "ratio", MEAN, "Share of responses at the length limit."),
        *spread("response_length_non_aborted", "tokens", "length of responses with tokens"),
        (
            "response_length_non_aborted/clip_ratio",
            "ratio",
            MEAN,
            "Share of those at the length limit.",
        ),
        *spread("prompt_length", "tokens", "prompt length"),
        ("prompt_length/clip_ratio", "ratio", MEAN, "Share of prompts at the length limit."),
        ("response/aborted_ratio", "ratio", MEAN, "Share of responses without a token."),
        *spread("num_turns", "turns", "number of turns of a conversation"),
        *spread("training/num_turns", "turns", "number of turns of a conversation"),
        *spread("tool_call_counts", "calls", "number of tool calls of a session"),
        ("rollout/rows_per_session", "rows", MEAN, "Rows that one session became, mean."),
        ("rollout/empty_sessions", "count", SUM, "Sessions with nothing to train on."),
        (
            "rollout/env_faults",
            "count",
            SUM,
            "Sessions that broken tools or environments ended; they take no part.",
        ),
        ("rollout/env_faults/<reason>", "count", SUM, "Those of one kind of fault."),
        ("rollout/tool_outcomes/<kind>", "count", SUM, "Tool calls that ended so."),
        ("rollout/fork_reasons/<reason>", "count", SUM, "Rows that sessions began anew, and why."),
        ("rollout/truncated_ratio", "ratio", MEAN, "Share of responses cut before they ended."),
        ("rollout/num_engines", "count", MAX, "Engines in service; they may join and leave."),
        ("rollout/engine_restarts", "count", SUM, "Engines lost and started again."),
        ("rollout/redispatched", "count", SUM, "Samples requested again after an engine was lost."),
        ("rollout/kept_kv/kl", "nats", MEAN, "KL per token of kept keys and values from fresh."),
        ("rollout/kept_kv/num_tokens", "tokens", SUM, "Tokens that it was measured on."),
        ("rollout/kept_kv/kl/<age>", "nats", MEAN, "By age: updates since the first token."),
        ("rollout/kept_kv/ess/<age>", "ratio", MEAN, "Effective sample size by age, 1 at best."),
        (
            "rollout/canary_max_diff",
            "nats",
            MAX,
            "Drift check after a weight update: log-probs of the engine against the trainer's.",
        ),
        ("train/num_gen_batches", "count", SUM, "Batches generated for one step."),
        ("train/num_groups_dropped", "count", SUM, "Prompts dropped by dynamic sampling."),
        ("train/num_groups_drawn", "count", SUM, "Prompts drawn where some are preferred."),
        ("train/num_groups_out_of_bounds", "count", SUM, "Those too easy or too hard."),
        ("train/num_groups_truncated", "count", SUM, "Those with a response at the length limit."),
        (
            "train/num_groups_filled_up",
            "count",
            SUM,
            "Such prompts that were trained on all the same.",
        ),
        (
            "training/old_log_prob_pass_skipped",
            "0 or 1",
            MEAN,
            "Whether the log-probs of sampling served as old log-probs.",
        ),
        (
            "training/rollout_probs_diff_mean",
            "probability",
            MEAN,
            "Mean difference of token probabilities between rollout and training.",
        ),
        ("training/rollout_probs_diff_max", "probability", MAX, "Largest such difference."),
        ("training/rollout_probs_diff_std", "probability", MEAN, "Its standard deviation."),
        ("training/rollout_probs_diff_valid", "0 or 1", MIN, "Whether it could be measured."),
        (
            "training/rollout_actor_probs_pearson_corr",
            "1",
            MEAN,
            "Correlation of token probabilities between rollout and training.",
        ),
    ),
    section(
        "Rollout correction",
        ("rollout_corr/kl", "nats", MEAN, "k1 estimate of KL(rollout, training) per token."),
        ("rollout_corr/k3_kl", "nats", MEAN, "k3 estimate of the same."),
        ("rollout_corr/chi2_token", "1", MEAN, "Chi-square divergence over tokens."),
        ("rollout_corr/chi2_seq", "1", MEAN, "Chi-square divergence over sequences."),
        ("rollout_corr/training_ppl", "1", MEAN, "Perplexity under the training policy."),
        ("rollout_corr/training_log_ppl", "nats", MEAN, "Its logarithm."),
        ("rollout_corr/rollout_ppl", "1", MEAN, "Perplexity under the rollout policy."),
        ("rollout_corr/rollout_log_ppl", "nats", MEAN, "Its logarithm."),
        ("rollout_corr/ppl_ratio", "1", MEAN, "Ratio of the two perplexities."),
        ("rollout_corr/log_ppl_diff", "nats", MEAN, "Difference of their logarithms."),
        ("rollout_corr/log_ppl_abs_diff", "nats", MEAN, "Absolute difference."),
        ("rollout_corr/log_ppl_diff_max", "nats", MAX, "Largest difference."),
        ("rollout_corr/log_ppl_diff_min", "nats", MIN, "Smallest difference."),
        ("rollout_corr/rollout_is_mean", "1", MEAN, "Mean importance ratio of tokens."),
        ("rollout_corr/rollout_is_std", "1", MEAN, "Its std within [1/threshold, threshold]."),
        ("rollout_corr/rollout_is_max", "1", MAX, "Largest importance ratio of a token."),
        ("rollout_corr/rollout_is_min", "1", MIN, "Smallest importance ratio of a token."),
        (
            "rollout_corr/rollout_is_eff_sample_size",
            "ratio",
            MEAN,
            "Effective sample size of ratios within [1/threshold, threshold].",
        ),
        (
            "rollout_corr/rollout_is_batch_norm_factor",
            "1",
            MEAN,
            "Mean weight that the batch was divided by.",
        ),
        (
            "rollout_corr/rollout_is_ratio_fraction_<side>",
            "ratio",
            MEAN,
            "Share above the threshold or below its inverse: of tokens, or of sequences where "
            "weights are theirs.",
        ),
        ("rollout_corr/rollout_is_seq_max", "1", MAX, "Largest ratio of a sequence."),
        ("rollout_corr/rollout_is_seq_min", "1", MIN, "Smallest ratio of a sequence."),
        ("rollout_corr/rollout_is_seq_max_deviation", "1", MAX, "Largest distance from 1."),
        ("rollout_corr/rollout_is_seq_<what>", "1", MEAN, "Of sequences: mean, std, fractions."),
        ("rollout_corr/rollout_rs_masked_fraction", "ratio", MEAN, "Share of tokens rejected."),
        (
            "rollout_corr/rollout_rs_seq_masked_fraction",
            "ratio",
            MEAN,
            "Share of sequences that lost a token.",
        ),
        ("rollout_corr/rollout_rs_<criterion>_max", "1", MAX, "Largest value of a criterion."),
        ("rollout_corr/rollout_rs_<criterion>_min", "1", MIN, "Smallest value of a criterion."),
        (
            "rollout_corr/rollout_rs_<criterion>_max_deviation",
            "1",
            MAX,
            "Largest distance of a criterion from 0.",
        ),
        (
            "rollout_corr/rollout_rs_<criterion>",
            "1",
            MEAN,
            "Of one criterion (k1 is -log r): mean, std, and the shares above, below and masked.",
        ),
    ),
    section(
        "Asynchronous training",
        *spread(
            "training/off_policy/trajectory_spans",
            "steps",
            "number of training steps between the oldest and the youngest token of a trajectory",
        ),
        *spread(
            "training/off_policy/trajectory_staleness",
            "steps",
            "age of a trajectory: the mean over its trained tokens",
        ),
        *spread(
            "training/off_policy/trajectory_staleness_worst",
            "steps",
            "age of the oldest trained token of a trajectory",
        ),
        (
            "training/off_policy/age_<age>/token_ratio",
            "ratio",
            MEAN,
            "Share of this age in the tokens.",
        ),
        (
            "training/off_policy/age_<age>/kl",
            "nats",
            MEAN,
            "k3 estimate of KL(sampling policy, actor before the update), tokens of this age.",
        ),
        (
            "training/off_policy/age_<age>/ess",
            "ratio",
            MEAN,
            "Effective sample size of the ratio of the two, tokens of this age; 1 is best.",
        ),
        ("training/off_policy/ess", "ratio", MEAN, "The same over all trained tokens."),
        (
            "training/off_policy/clipfrac",
            "ratio",
            MEAN,
            "Share of trained tokens for which that ratio is outside the clip range already.",
        ),
        (
            "actor/behaviour_clipfrac",
            "ratio",
            MEAN,
            "Share of trained tokens whose ratio to the policy that sampled them is outside the "
            "clip range, in the update.",
        ),
        (
            "actor/behaviour_kl",
            "nats",
            MEAN,
            "k3 estimate of KL(sampling policy, trained policy), in the update.",
        ),
        (
            "<phase>/off_policy/evicted_samples",
            "count",
            SUM,
            "Trajectories rejected because a token was too old; 0 unless that is asked for.",
        ),
        (
            "training/off_policy/evicted_length_ratio",
            "ratio",
            MEAN,
            "Mean length of rejected trajectories over that of all: above 1, long ones are lost.",
        ),
        ("<phase>/filter_groups/evicted_samples", "count", SUM, "Prompts that taught nothing."),
        ("<phase>/rollout_failure/evicted_samples", "count", SUM, "Prompts without an answer."),
        (
            "fully_async/count/total_generated_samples",
            "count",
            MAX,
            "Prompts answered since the start.",
        ),
        (
            "fully_async/count/stale_samples_processed",
            "count",
            SUM,
            "Prompts of the step with a token of an older policy.",
        ),
        (
            "fully_async/count/stale_trajectory_processed",
            "count",
            SUM,
            "Trajectories of the step with a token of an older policy.",
        ),
        ("fully_async/count/current_param_version", "1", MAX, "Policy version before the update."),
        (
            "fully_async/count/dropped_stale_samples",
            "count",
            SUM,
            "The older name of `training/off_policy/evicted_samples`.",
        ),
        (
            "fully_async/partial/total_partial_num",
            "count",
            SUM,
            "Trajectories of the step that several policies sampled.",
        ),
        ("fully_async/partial/partial_ratio", "ratio", MEAN, "Their share."),
        ("fully_async/partial/max_partial_span", "steps", MAX, "Largest span of a trajectory."),
        (
            "fully_async/count/cut_tokens",
            "tokens",
            SUM,
            "Sampled in vain: their row had run ahead of an update.",
        ),
        ("separate_async/switch/count", "count", SUM, "Times that devices were lent to rollout."),
        (
            "separate_async/decision/finished_ratio",
            "ratio",
            MEAN,
            "Share of the awaited rows that had ended when it was decided.",
        ),
        (
            "separate_async/decision/threshold",
            "ratio",
            MEAN,
            "Share up to which devices are lent.",
        ),
        ("fully_async/total_wait_time", "s", SUM, "Seconds the trainer waited for rows."),
        ("trainer/idle_ratio", "ratio", MEAN, "Share of the step in which the trainer waited."),
        ("rollouter/idle_ratio", "ratio", MEAN, "Share of the step in which generation waited."),
        ("rollouter/active_time", "s", MAX, "Seconds of generation."),
        ("rollouter/version_time", "s", MAX, "Seconds between two publishes."),
        ("rollouter/validate_time", "s", MAX, "Seconds of validation."),
    ),
    section(
        "Validation",
        (
            "val-core/<source>/<variable>/<statistic>",
            "as reported",
            MEAN,
            "The main number of a data source: `mean@n`, `maj@n` or `best@n` of its variable.",
        ),
        ("val-aux/<source>/<variable>/<statistic>", "as reported", MEAN, "Every other statistic."),
        (
            "val-aux/env_faults",
            "samples",
            SUM,
            "Validation samples whose tools or environments broke; they have no score.",
        ),
        ("val-aux/num_turns/<statistic>", "turns", MEAN, "Turns of validation conversations."),
        ("val/<name>", "as reported", MEAN, "Validation of supervised training, such as val/loss."),
    ),
    section(
        "Experts",
        ("actor/router_aux_loss", "1", SUM, "Load-balance loss per row; k when even."),
        ("actor/router_mismatch", "ratio", SUM, "Replayed routes the router would not choose."),
        ("actor/expert_load_max", "1", MAX, "Largest load of an expert over the mean."),
        ("actor/expert_load_max/<layer>", "1", MAX, "The same of one layer."),
        ("actor/expert_load_max_mean", "1", MAX, "Its mean over layers."),
        ("actor/idle_experts", "ratio", MAX, "Share of experts that no token went to."),
    ),
    section(
        "Time, speed, memory",
        ("timing_s/update_weights", "s", MAX, "Seconds until engines had new, checked weights."),
        (
            "timing_s/update_weights/<phase>",
            "s",
            MAX,
            "Of these: `wake_up` (memory taken again), `transfer` (bytes and fingerprints), `load` "
            "(the engine's own work), `check` (drift check); and `stall`, how long no token could "
            "be generated.",
        ),
        ("timing_s/<stage>", "s", MAX, "Seconds of a stage of the step, or of its agent loops."),
        ("timing_per_token_ms/<stage>", "ms", MEAN, "Milliseconds of a stage per token."),
        ("perf/total_num_tokens", "tokens", SUM, "Tokens of the step, prompts included."),
        ("perf/time_per_step", "s", MAX, "Seconds of the step."),
        ("perf/throughput", "tokens/s", MEAN, "Tokens per second and device."),
        ("perf/mfu/<role>", "ratio", MEAN, "Model FLOPs utilisation, where the peak is known."),
        ("perf/cpu_memory_used_gb", "GiB", MAX, "Largest resident memory of this process so far."),
        ("perf/max_memory_allocated_gb", "GiB", MAX, "Largest device memory allocated."),
        ("perf/max_memory_reserved_gb", "GiB", MAX, "Largest device memory reserved."),
        ("global_seqlen/<what>", "tokens", MEAN, "How evenly tokens are spread over ranks."),
    ),
    section(
        "Run",
        ("training/global_step", "steps", MAX, "Number of the step."),
        ("training/epoch", "epochs", MAX, "Passes over the data, counted from 0."),
        ("tripwire/<name>", "count", SUM, "Times a warning sign has shown so far."),
    ),
    section(
        "Supervised training",
        ("train/loss", "nats", MEAN, "Mean loss per trained token."),
        ("train/grad_norm", "1", MEAN, "Gradient norm before clipping."),
        ("train/lr", "1", MEAN, "Learning rate."),
        ("train/lr(1e-3)", "1e-3", MEAN, "Learning rate in thousandths."),
        ("train/mfu", "ratio", MEAN, "Model FLOPs utilisation, where the peak is known."),
        ("train/global_tokens", "tokens", SUM, "Tokens of the step."),
        ("train/trained_tokens", "tokens", SUM, "Tokens that carry loss."),
        ("train/total_tokens(B)", "1e9 tokens", MAX, "Tokens since the start."),
        ("train/time(s)", "s", MAX, "Seconds of the step."),
        ("train/tokens_per_second", "tokens/s", MEAN, "Tokens per second."),
        ("train/accuracy", "ratio", MEAN, "Reward models: pairs whose chosen side scores higher."),
        ("train/margin", "reward", MEAN, "Reward models: score of the chosen side less the other."),
    ),
)

_own: list[DeclaredMetric] = []


def declare(name: str, unit: str, combine: str | AggregationType, meaning: str) -> None:
    """Add a metric of one's own, for a loss or recipe whose metric is no mean over tokens."""
    _own.append(DeclaredMetric(name, unit, AggregationType(combine), meaning))
    declared_metric.cache_clear()


@cache
def declared_metric(name: str) -> DeclaredMetric | None:
    """The row for this name, the first that fits; None if nobody has declared it."""
    rows = [*_own, *(metric for one in SECTIONS for metric in one.metrics)]
    for metric in rows:
        if re.fullmatch(re.sub(r"<\w+>", ".+", re.escape(metric.name)), name):
            return metric
    return None


def combination_of(name: str) -> AggregationType:
    """How parts that passes and ranks report become one: SUM are shares that add up, as those of
    a loss; what nobody has declared is a mean over response tokens."""
    metric = declared_metric(name)
    return AggregationType.MEAN if metric is None else metric.combine


def as_markdown() -> str:
    lines = [
        "# Metrics",
        "",
        "Generated from `verl/utils/metric/declared.py` (`make config`). *Combine* says how the "
        "parts that",
        "micro-batches, optimizer steps and ranks report become one number.",
    ]
    for one in SECTIONS:
        lines += ["", f"## {one.title}", "", "| metric | unit | combine | meaning |"]
        lines.append("|---|---|---|---|")
        for metric in one.metrics:
            name = metric.name.replace("<", "&lt;").replace(">", "&gt;")
            lines.append(f"| {name} | {metric.unit} | {metric.combine.value} | {metric.meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path("docs/metrics.md").write_text(as_markdown())
