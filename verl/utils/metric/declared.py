"""Every metric a run reports, once: name, unit, how parts of it combine, one sentence.

Parts are what micro-batches, optimizer steps and ranks report of one metric. How they become one
number follows from this table, never from how a name ends. `<stage>` and the like stand for what a
run fills in. docs/metrics.md is made from here: `python -m verl.utils.metric.declared`.

A metric that a user's own loss or recipe reports is averaged over response tokens, unless
`declare` says otherwise.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from verl.utils.metric.utils import AggregationType

MEAN, SUM, MAX, MIN = (
    AggregationType.MEAN,
    AggregationType.SUM,
    AggregationType.MAX,
    AggregationType.MIN,
)


@dataclass(frozen=True)
class DeclaredMetric:
    """One row of the table; `name` may have `<parts>` that stand for any text."""

    name: str
    unit: str
    combine: AggregationType
    meaning: str


@dataclass(frozen=True)
class Section:
    title: str
    metrics: tuple[DeclaredMetric, ...]


def _section(title: str, *rows: tuple[str, str, AggregationType, str]) -> Section:
    return Section(title, tuple(DeclaredMetric(*row) for row in rows))


def _spread(name: str, unit: str, what: str) -> list[tuple[str, str, AggregationType, str]]:
    return [
        (f"{name}/mean", unit, MEAN, f"Mean {what}."),
        (f"{name}/max", unit, MAX, f"Largest {what}."),
        (f"{name}/min", unit, MIN, f"Smallest {what}."),
    ]


SECTIONS = (
    _section(
        "Update",
        (
            "actor/pg_loss",
            "loss",
            SUM,
            "Policy-gradient loss; passes and ranks report their share of it, optimizer steps are "
            "averaged.",
        ),
        ("actor/kl_loss", "nats", SUM, "KL to the reference policy as it enters the loss."),
        ("actor/ce_loss", "nats", SUM, "Cross-entropy on tokens with weights of their own."),
        ("distillation/loss", "loss", SUM, "Distillation loss, its coefficient included."),
        (
            "distillation/divergence",
            "nats",
            MEAN,
            "Divergence of `distillation_loss.loss_mode` per response token, after its clamp.",
        ),
        ("distillation/teacher_kl", "nats", MEAN, "k1 estimate of the KL to the teacher."),
        (
            "distillation/top1_agreement",
            "ratio",
            MEAN,
            "Share of positions where student and teacher find the same token likeliest.",
        ),
        ("distillation/student_mass", "1", MEAN, "The student's mass on the teacher's top K."),
        ("distillation/teacher_mass", "1", MEAN, "The teacher's mass on its top K."),
        (
            "distillation/num_missing_answers",
            "responses",
            SUM,
            "Responses whose teacher's endpoint gave no answer; they left the step.",
        ),
        (
            "actor/dpo_accuracy",
            "ratio",
            SUM,
            "Share of pairs whose chosen response has the larger log-ratio.",
        ),
        (
            "actor/dpo_margin",
            "nats",
            SUM,
            "Mean of beta times the difference of log-ratios, chosen minus rejected.",
        ),
        (
            "actor/dpo_chosen_reward",
            "nats",
            SUM,
            "Mean of beta times the log-ratio of chosen responses.",
        ),
        ("actor/dpo_rejected_reward", "nats", SUM, "The same of rejected responses."),
        ("actor/dpo_num_pairs", "count", SUM, "Pairs of an optimizer step."),
        (
            "actor/sequence_residual",
            "1",
            SUM,
            "Mean distance of log-ratios of whole responses from their targets (SPPO, GVPO).",
        ),
        (
            "actor/sequence_log_ratio",
            "nats",
            SUM,
            "Mean log-ratio of whole responses to the old policy (SPPO, GVPO).",
        ),
        (
            "actor/dppo_divergence",
            "1",
            MEAN,
            "Divergence of new and old policy on a token, as DPPO bounds it.",
        ),
        ("actor/dro_penalty", "nats^2", MEAN, "Half the squared log-ratio of a token."),
        ("training/replayed_ratio", "ratio", MEAN, "Share of PF-PPO's draws from earlier steps."),
        ("actor/kl_coef", "1", MEAN, "What `actor/kl_loss` is multiplied by in the loss."),
        ("actor/entropy_loss", "nats", SUM, "Entropy as it enters the loss."),
        ("critic/vf_loss", "loss", SUM, "Value loss of the critic."),
        ("actor/entropy", "nats", MEAN, "Entropy of the policy per response token."),
        ("actor/pg_clipfrac", "ratio", MEAN, "Share of response tokens clipped by the loss."),
        (
            "actor/pg_clipfrac_lower",
            "ratio",
            MEAN,
            "Share of response tokens clipped by the dual-clip bound.",
        ),
        ("actor/ppo_kl", "nats", MEAN, "KL of the updated policy to the one before the update."),
        ("actor/lr", "1", MEAN, "Learning rate of the last optimizer step."),
        ("critic/lr", "1", MEAN, "Learning rate of the critic's last optimizer step."),
        ("actor/grad_norm", "1", MEAN, "Gradient norm before clipping, mean over optimizer steps."),
        ("critic/grad_norm", "1", MEAN, "Gradient norm of the critic before clipping."),
        ("<role>/num_optimizer_steps", "count", SUM, "Optimizer steps taken."),
        ("<role>/num_skipped_steps", "count", SUM, "Optimizer steps skipped: not finite."),
        ("<role>/num_oom_splits", "count", SUM, "Passes split in two because memory ran out."),
        ("<role>/loss_scale", "1", MEAN, "Loss scale of fp16 training."),
        (
            "actor/old_log_prob_error",
            "nats",
            MEAN,
            "Difference between old log-probs and those at the start of the update; 0 is exact.",
        ),
        ("actor/ref_kl", "nats", MEAN, "k1 estimate of the KL to the reference policy."),
        ("actor/ref_distance", "nats", MEAN, "Absolute log-prob difference to the reference."),
        ("actor/reward_kl_penalty", "nats", MEAN, "KL penalty subtracted from rewards."),
        ("actor/reward_kl_penalty_coeff", "1", MEAN, "Coefficient of that penalty."),
        ("critic/vf_clipfrac", "ratio", MEAN, "Share of response tokens with a clipped value."),
        ("critic/vpred_mean", "reward", MEAN, "Mean predicted value."),
        (
            "critic/vf_explained_var",
            "ratio",
            MEAN,
            "Variance of returns that values explain: 1 is perfect, 0 no better than their mean.",
        ),
    ),
    _section(
        "Rewards and credit",
        *_spread("critic/score", "reward", "score of a response, before penalties"),
        *_spread("critic/rewards", "reward", "reward of a response, after penalties"),
        *_spread("critic/advantages", "reward", "advantage of a response token"),
        *_spread("critic/returns", "reward", "return of a response token"),
        *_spread("critic/values", "reward", "value of a response token"),
        ("preference/num_pairs", "count", SUM, "Pairs of chosen and rejected responses."),
        (
            "preference/num_prompts_tied",
            "count",
            SUM,
            "Prompts whose responses have equal rewards: no pair.",
        ),
        ("preference/num_prompts_alone", "count", SUM, "Prompts with one response left: no pair."),
        (
            "preference/num_same_as_answer",
            "count",
            SUM,
            "Responses equal to the dataset's answer: no pair.",
        ),
        (
            "preference/num_answers_too_long",
            "count",
            SUM,
            "Answers of the dataset that no response could hold: no pair.",
        ),
        ("reward/num_errors", "count", SUM, "Calls of graders that failed."),
        ("reward/num_abstained", "count", SUM, "Responses the grader gave no verdict on."),
        ("reward/num_audited", "count", SUM, "Scored responses that math-verify graded too."),
        (
            "reward/num_audit_disagreements",
            "count",
            SUM,
            "Responses that math-verify and the grader judge differently.",
        ),
        ("reward/num_groups_set_aside", "count", SUM, "Prompts dropped from the step."),
        (
            "reward/ratio_groups_without_spread",
            "ratio",
            MEAN,
            "Share of prompts whose responses all have the same score: they teach nothing.",
        ),
        ("reward/<name>/mean", "as reported", MEAN, "Mean of a number the grader reported."),
        ("reward_model/input_length/mean", "tokens", MEAN, "Mean input of the reward model."),
        ("reward_model/input_length/max", "tokens", MAX, "Longest input of the reward model."),
        ("reward_model/num_truncated", "count", SUM, "Inputs of the reward model that were cut."),
        ("reward_model/dpo_loss", "nats", SUM, "PRIME: cross-entropy of the implicit model."),
        ("reward_model/reward", "reward", MEAN, "PRIME: beta times the log-ratio of a response."),
        (
            "reward_model/dpo_acc",
            "ratio",
            MEAN,
            "PRIME: how often the better of two responses to a prompt has the larger log-ratio.",
        ),
        (
            "reward_model/dpo_acc_abs",
            "ratio",
            MEAN,
            "PRIME: share of responses whose log-ratio is above 0 exactly if they are right.",
        ),
        ("reward_model/grad_norm", "1", MEAN, "PRIME: gradient norm before clipping."),
        ("reward_model/lr", "1", MEAN, "PRIME: learning rate of the implicit model."),
        ("variance_proxy/proxy1_signal_strength", "1", MEAN, "Squared norm of the mean gradient."),
        ("variance_proxy/proxy2_total_power", "1", MEAN, "Mean power of per-response gradients."),
        (
            "variance_proxy/proxy3_pure_noise",
            "1",
            MEAN,
            "Variance of the mean gradient, 0 or more.",
        ),
        ("variance_proxy/expected_a_squared", "1", MEAN, "Mean squared advantage."),
        ("variance_proxy/expected_w", "1", MEAN, "Mean squared norm of the score function."),
    ),
    _section(
        "Generation",
        *_spread("response_length", "tokens", "response length"),
        ("response_length/clip_ratio", "ratio", MEAN, "Share of responses at the length limit."),
        *_spread("response_length_non_aborted", "tokens", "length of responses with tokens"),
        (
            "response_length_non_aborted/clip_ratio",
            "ratio",
            MEAN,
            "Share of those at the length limit.",
        ),
        *_spread("prompt_length", "tokens", "prompt length"),
        ("prompt_length/clip_ratio", "ratio", MEAN, "Share of prompts at the length limit."),
        ("response/aborted_ratio", "ratio", MEAN, "Share of responses without a token."),
        *_spread("num_turns", "turns", "number of turns of a conversation"),
        *_spread("training/num_turns", "turns", "number of turns of a conversation"),
        *_spread("tool_call_counts", "calls", "number of tool calls of a session"),
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
    _section(
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
    _section(
        "Asynchronous training",
        *_spread(
            "training/off_policy/trajectory_spans",
            "steps",
            "number of training steps between the oldest and the youngest token of a trajectory",
        ),
        *_spread(
            "training/off_policy/trajectory_staleness",
            "steps",
            "age of a trajectory: the mean over its trained tokens",
        ),
        *_spread(
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
    _section(
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
    _section(
        "Experts",
        ("actor/router_aux_loss", "1", SUM, "Load-balance loss per row; k when even."),
        ("actor/router_mismatch", "ratio", SUM, "Replayed routes the router would not choose."),
        ("actor/expert_load_max", "1", MAX, "Largest load of an expert over the mean."),
        ("actor/expert_load_max/<layer>", "1", MAX, "The same of one layer."),
        ("actor/expert_load_max_mean", "1", MAX, "Its mean over layers."),
        ("actor/idle_experts", "ratio", MAX, "Share of experts that no token went to."),
    ),
    _section(
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
    _section(
        "Run",
        ("training/global_step", "steps", MAX, "Number of the step."),
        ("training/epoch", "epochs", MAX, "Passes over the data, counted from 0."),
        ("tripwire/<name>", "count", SUM, "Times a warning sign has shown so far."),
    ),
    _section(
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
    rows = [*_own, *(metric for section in SECTIONS for metric in section.metrics)]
    for metric in rows:
        if re.fullmatch(re.sub(r"<\w+>", ".+", re.escape(metric.name)), name):
            return metric
    return None


def is_sum_of_shares(name: str) -> bool:
    """Whether passes and ranks report shares that add up, as losses do."""
    metric = declared_metric(name)
    return metric is not None and metric.combine is AggregationType.SUM


def as_markdown() -> str:
    lines = [
        "# Metrics",
        "",
        "Generated from `verl/utils/metric/declared.py` (`make config`). *Combine* says how the "
        "parts that",
        "micro-batches, optimizer steps and ranks report become one number.",
    ]
    for section in SECTIONS:
        lines += ["", f"## {section.title}", "", "| metric | unit | combine | meaning |"]
        lines.append("|---|---|---|---|")
        for metric in section.metrics:
            name = metric.name.replace("<", "&lt;").replace(">", "&gt;")
            lines.append(f"| {name} | {metric.unit} | {metric.combine.value} | {metric.meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path("docs/metrics.md").write_text(as_markdown())
