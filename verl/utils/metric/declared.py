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

TABLE = """
## Update
actor/pg_loss | loss | sum | Policy-gradient loss; passes and ranks report their share of it,
    optimizer steps are averaged.
actor/kl_loss | nats | sum | KL to the reference policy as it enters the loss.
actor/ce_loss | nats | sum | Cross-entropy on tokens with weights of their own.
distillation/loss | loss | sum | Distillation loss, its coefficient included.
distillation/divergence | nats | mean | Divergence of `distillation_loss.loss_mode` per response
    token, after its clamp.
distillation/teacher_kl | nats | mean | k1 estimate of the KL to the teacher.
distillation/top1_agreement | ratio | mean | Share of positions where student and teacher find the
    same token likeliest.
distillation/student_mass | 1 | mean | The student's mass on the teacher's top K.
distillation/teacher_mass | 1 | mean | The teacher's mass on its top K.
distillation/num_missing_answers | responses | sum | Responses whose teacher's endpoint gave no
    answer; they left the step.
actor/dpo_accuracy | ratio | sum | Share of pairs whose chosen response has the larger log-ratio.
actor/dpo_margin | nats | sum | Mean of beta times the difference of log-ratios, chosen minus
    rejected.
actor/dpo_chosen_reward | nats | sum | Mean of beta times the log-ratio of chosen responses.
actor/dpo_rejected_reward | nats | sum | The same of rejected responses.
actor/dpo_num_pairs | count | sum | Pairs of an optimizer step.
actor/sequence_residual | 1 | sum | Mean distance of log-ratios of whole responses from their
    targets (SPPO, GVPO).
actor/sequence_log_ratio | nats | sum | Mean log-ratio of whole responses to the old policy (SPPO,
    GVPO).
actor/dppo_divergence | 1 | mean | Divergence of new and old policy on a token, as DPPO bounds it.
actor/dro_penalty | nats^2 | mean | Half the squared log-ratio of a token.
training/replayed_ratio | ratio | mean | Share of PF-PPO's draws from earlier steps.
actor/kl_coef | 1 | mean | What `actor/kl_loss` is multiplied by in the loss.
actor/entropy_loss | nats | sum | Entropy as it enters the loss.
critic/vf_loss | loss | sum | Value loss of the critic.
actor/entropy | nats | mean | Entropy of the policy per response token.
actor/pg_clipfrac | ratio | mean | Share of response tokens clipped by the loss.
actor/pg_clipfrac_lower | ratio | mean | Share of response tokens clipped by the dual-clip bound.
actor/ppo_kl | nats | mean | KL of the updated policy to the one before the update.
actor/lr | 1 | mean | Learning rate of the last optimizer step.
critic/lr | 1 | mean | Learning rate of the critic's last optimizer step.
actor/grad_norm | 1 | mean | Gradient norm before clipping, mean over optimizer steps.
critic/grad_norm | 1 | mean | Gradient norm of the critic before clipping.
<role>/num_optimizer_steps | count | sum | Optimizer steps taken.
<role>/num_skipped_steps | count | sum | Optimizer steps skipped: not finite.
<role>/num_oom_splits | count | sum | Passes split in two because memory ran out.
<role>/loss_scale | 1 | mean | Loss scale of fp16 training.
actor/old_log_prob_error | nats | mean | Difference between old log-probs and those at the start of
    the update; 0 is exact.
actor/ref_kl | nats | mean | k1 estimate of the KL to the reference policy.
actor/ref_distance | nats | mean | Absolute log-prob difference to the reference.
actor/reward_kl_penalty | nats | mean | KL penalty subtracted from rewards.
actor/reward_kl_penalty_coeff | 1 | mean | Coefficient of that penalty.
critic/vf_clipfrac | ratio | mean | Share of response tokens with a clipped value.
critic/vpred_mean | reward | mean | Mean predicted value.
critic/vf_explained_var | ratio | mean | Variance of returns that values explain: 1 is perfect, 0 no
    better than their mean.

## Rewards and credit
critic/score | reward | mean, max, min | score of a response, before penalties.
critic/rewards | reward | mean, max, min | reward of a response, after penalties.
critic/advantages | reward | mean, max, min | advantage of a response token.
critic/returns | reward | mean, max, min | return of a response token.
critic/values | reward | mean, max, min | value of a response token.
preference/num_pairs | count | sum | Pairs of chosen and rejected responses.
preference/num_prompts_tied | count | sum | Prompts whose responses have equal rewards: no pair.
preference/num_prompts_alone | count | sum | Prompts with one response left: no pair.
preference/num_same_as_answer | count | sum | Responses equal to the dataset's answer: no pair.
preference/num_answers_too_long | count | sum | Answers of the dataset that no response could hold:
    no pair.
reward/num_errors | count | sum | Calls of graders that failed.
reward/num_abstained | count | sum | Responses the grader gave no verdict on.
reward/num_audited | count | sum | Scored responses that math-verify graded too.
reward/num_audit_disagreements | count | sum | Responses that math-verify and the grader judge
    differently.
reward/num_groups_set_aside | count | sum | Prompts dropped from the step.
reward/ratio_groups_without_spread | ratio | mean | Share of prompts whose responses all have the
    same score: they teach nothing.
reward/<name>/mean | as reported | mean | Mean of a number the grader reported.
reward_model/input_length/mean | tokens | mean | Mean input of the reward model.
reward_model/input_length/max | tokens | max | Longest input of the reward model.
reward_model/num_truncated | count | sum | Inputs of the reward model that were cut.
reward_model/dpo_loss | nats | sum | PRIME: cross-entropy of the implicit model.
reward_model/reward | reward | mean | PRIME: beta times the log-ratio of a response.
reward_model/dpo_acc | ratio | mean | PRIME: how often the better of two responses to a prompt has
    the larger log-ratio.
reward_model/dpo_acc_abs | ratio | mean | PRIME: share of responses whose log-ratio is above 0
    exactly if they are right.
reward_model/grad_norm | 1 | mean | PRIME: gradient norm before clipping.
reward_model/lr | 1 | mean | PRIME: learning rate of the implicit model.
variance_proxy/proxy1_signal_strength | 1 | mean | Squared norm of the mean gradient.
variance_proxy/proxy2_total_power | 1 | mean | Mean power of per-response gradients.
variance_proxy/proxy3_pure_noise | 1 | mean | Variance of the mean gradient, 0 or more.
variance_proxy/expected_a_squared | 1 | mean | Mean squared advantage.
variance_proxy/expected_w | 1 | mean | Mean squared norm of the score function.

## Generation
response_length | tokens | mean, max, min | response length.
response_length/clip_ratio | ratio | mean | Share of responses at the length limit.
response_length_non_aborted | tokens | mean, max, min | length of responses with tokens.
response_length_non_aborted/clip_ratio | ratio | mean | Share of those at the length limit.
prompt_length | tokens | mean, max, min | prompt length.
prompt_length/clip_ratio | ratio | mean | Share of prompts at the length limit.
response/aborted_ratio | ratio | mean | Share of responses without a token.
num_turns | turns | mean, max, min | number of turns of a conversation.
training/num_turns | turns | mean, max, min | number of turns of a conversation.
tool_call_counts | calls | mean, max, min | number of tool calls of a session.
rollout/rows_per_session | rows | mean | Rows that one session became, mean.
rollout/empty_sessions | count | sum | Sessions with nothing to train on.
rollout/env_faults | count | sum | Sessions that broken tools or environments ended; they take no
    part.
rollout/env_faults/<reason> | count | sum | Those of one kind of fault.
rollout/tool_outcomes/<kind> | count | sum | Tool calls that ended so.
rollout/fork_reasons/<reason> | count | sum | Rows that sessions began anew, and why.
rollout/truncated_ratio | ratio | mean | Share of responses cut before they ended.
rollout/num_engines | count | max | Engines in service; they may join and leave.
rollout/engine_restarts | count | sum | Engines lost and started again.
rollout/redispatched | count | sum | Samples requested again after an engine was lost.
rollout/kept_kv/kl | nats | mean | KL per token of kept keys and values from fresh.
rollout/kept_kv/num_tokens | tokens | sum | Tokens that it was measured on.
rollout/kept_kv/kl/<age> | nats | mean | By age: updates since the first token.
rollout/kept_kv/ess/<age> | ratio | mean | Effective sample size by age, 1 at best.
rollout/canary_max_diff | nats | max | Drift check after a weight update: log-probs of the engine
    against the trainer's.
train/num_gen_batches | count | sum | Batches generated for one step.
train/num_groups_dropped | count | sum | Prompts dropped by dynamic sampling.
train/num_groups_drawn | count | sum | Prompts drawn where some are preferred.
train/num_groups_out_of_bounds | count | sum | Those too easy or too hard.
train/num_groups_truncated | count | sum | Those with a response at the length limit.
train/num_groups_filled_up | count | sum | Such prompts that were trained on all the same.
training/old_log_prob_pass_skipped | 0 or 1 | mean | Whether the log-probs of sampling served as old
    log-probs.
training/rollout_probs_diff_mean | probability | mean | Mean difference of token probabilities
    between rollout and training.
training/rollout_probs_diff_max | probability | max | Largest such difference.
training/rollout_probs_diff_std | probability | mean | Its standard deviation.
training/rollout_probs_diff_valid | 0 or 1 | min | Whether it could be measured.
training/rollout_actor_probs_pearson_corr | 1 | mean | Correlation of token probabilities between
    rollout and training.

## Rollout correction
rollout_corr/kl | nats | mean | k1 estimate of KL(rollout, training) per token.
rollout_corr/k3_kl | nats | mean | k3 estimate of the same.
rollout_corr/chi2_token | 1 | mean | Chi-square divergence over tokens.
rollout_corr/chi2_seq | 1 | mean | Chi-square divergence over sequences.
rollout_corr/training_ppl | 1 | mean | Perplexity under the training policy.
rollout_corr/training_log_ppl | nats | mean | Its logarithm.
rollout_corr/rollout_ppl | 1 | mean | Perplexity under the rollout policy.
rollout_corr/rollout_log_ppl | nats | mean | Its logarithm.
rollout_corr/ppl_ratio | 1 | mean | Ratio of the two perplexities.
rollout_corr/log_ppl_diff | nats | mean | Difference of their logarithms.
rollout_corr/log_ppl_abs_diff | nats | mean | Absolute difference.
rollout_corr/log_ppl_diff_max | nats | max | Largest difference.
rollout_corr/log_ppl_diff_min | nats | min | Smallest difference.
rollout_corr/rollout_is_mean | 1 | mean | Mean importance ratio of tokens.
rollout_corr/rollout_is_std | 1 | mean | Its std within [1/threshold, threshold].
rollout_corr/rollout_is_max | 1 | max | Largest importance ratio of a token.
rollout_corr/rollout_is_min | 1 | min | Smallest importance ratio of a token.
rollout_corr/rollout_is_eff_sample_size | ratio | mean | Effective sample size of ratios within
    [1/threshold, threshold].
rollout_corr/rollout_is_batch_norm_factor | 1 | mean | Mean weight that the batch was divided by.
rollout_corr/rollout_is_ratio_fraction_<side> | ratio | mean | Share above the threshold or below
    its inverse: of tokens, or of sequences where weights are theirs.
rollout_corr/rollout_is_seq_max | 1 | max | Largest ratio of a sequence.
rollout_corr/rollout_is_seq_min | 1 | min | Smallest ratio of a sequence.
rollout_corr/rollout_is_seq_max_deviation | 1 | max | Largest distance from 1.
rollout_corr/rollout_is_seq_<what> | 1 | mean | Of sequences: mean, std, fractions.
rollout_corr/rollout_rs_masked_fraction | ratio | mean | Share of tokens rejected.
rollout_corr/rollout_rs_seq_masked_fraction | ratio | mean | Share of sequences that lost a token.
rollout_corr/rollout_rs_<criterion>_max | 1 | max | Largest value of a criterion.
rollout_corr/rollout_rs_<criterion>_min | 1 | min | Smallest value of a criterion.
rollout_corr/rollout_rs_<criterion>_max_deviation | 1 | max | Largest distance of a criterion from
    0.
rollout_corr/rollout_rs_<criterion> | 1 | mean | Of one criterion (k1 is -log r): mean, std, and the
    shares above, below and masked.

## Asynchronous training
training/off_policy/trajectory_spans | steps | mean, max, min | number of training steps between the
    oldest and the youngest token of a trajectory.
training/off_policy/trajectory_staleness | steps | mean, max, min | age of a trajectory: the mean
    over its trained tokens.
training/off_policy/trajectory_staleness_worst | steps | mean, max, min | age of the oldest trained
    token of a trajectory.
training/off_policy/age_<age>/token_ratio | ratio | mean | Share of this age in the tokens.
training/off_policy/age_<age>/kl | nats | mean | k3 estimate of KL(sampling policy, actor before the
    update), tokens of this age.
training/off_policy/age_<age>/ess | ratio | mean | Effective sample size of the ratio of the two,
    tokens of this age; 1 is best.
training/off_policy/ess | ratio | mean | The same over all trained tokens.
training/off_policy/clipfrac | ratio | mean | Share of trained tokens for which that ratio is
    outside the clip range already.
actor/behaviour_clipfrac | ratio | mean | Share of trained tokens whose ratio to the policy that
    sampled them is outside the clip range, in the update.
actor/behaviour_kl | nats | mean | k3 estimate of KL(sampling policy, trained policy), in the
    update.
<phase>/off_policy/evicted_samples | count | sum | Trajectories rejected because a token was too
    old; 0 unless that is asked for.
training/off_policy/evicted_length_ratio | ratio | mean | Mean length of rejected trajectories over
    that of all: above 1, long ones are lost.
<phase>/filter_groups/evicted_samples | count | sum | Prompts that taught nothing.
<phase>/rollout_failure/evicted_samples | count | sum | Prompts without an answer.
fully_async/count/total_generated_samples | count | max | Prompts answered since the start.
fully_async/count/stale_samples_processed | count | sum | Prompts of the step with a token of an
    older policy.
fully_async/count/stale_trajectory_processed | count | sum | Trajectories of the step with a token
    of an older policy.
fully_async/count/current_param_version | 1 | max | Policy version before the update.
fully_async/count/dropped_stale_samples | count | sum | The older name of
    `training/off_policy/evicted_samples`.
fully_async/partial/total_partial_num | count | sum | Trajectories of the step that several policies
    sampled.
fully_async/partial/partial_ratio | ratio | mean | Their share.
fully_async/partial/max_partial_span | steps | max | Largest span of a trajectory.
fully_async/count/cut_tokens | tokens | sum | Sampled in vain: their row had run ahead of an update.
separate_async/switch/count | count | sum | Times that devices were lent to rollout.
separate_async/decision/finished_ratio | ratio | mean | Share of the awaited rows that had ended
    when it was decided.
separate_async/decision/threshold | ratio | mean | Share up to which devices are lent.
fully_async/total_wait_time | s | sum | Seconds the trainer waited for rows.
trainer/idle_ratio | ratio | mean | Share of the step in which the trainer waited.
rollouter/idle_ratio | ratio | mean | Share of the step in which generation waited.
rollouter/active_time | s | max | Seconds of generation.
rollouter/version_time | s | max | Seconds between two publishes.
rollouter/validate_time | s | max | Seconds of validation.

## Validation
val-core/<source>/<variable>/<statistic> | as reported | mean | The main number of a data source:
    `mean@n`, `maj@n` or `best@n` of its variable.
val-aux/<source>/<variable>/<statistic> | as reported | mean | Every other statistic.
val-aux/env_faults | samples | sum | Validation samples whose tools or environments broke; they have
    no score.
val-aux/num_turns/<statistic> | turns | mean | Turns of validation conversations.
val/<name> | as reported | mean | Validation of supervised training, such as val/loss.

## Experts
actor/router_aux_loss | 1 | sum | Load-balance loss per row; k when even.
actor/router_mismatch | ratio | sum | Replayed routes the router would not choose.
actor/expert_load_max | 1 | max | Largest load of an expert over the mean.
actor/expert_load_max/<layer> | 1 | max | The same of one layer.
actor/expert_load_max_mean | 1 | max | Its mean over layers.
actor/idle_experts | ratio | max | Share of experts that no token went to.

## Time, speed, memory
timing_s/update_weights | s | max | Seconds until engines had new, checked weights.
timing_s/update_weights/<phase> | s | max | Of these: `wake_up` (memory taken again), `transfer`
    (bytes and fingerprints), `load` (the engine's own work), `check` (drift check); and `stall`,
    how long no token could be generated.
timing_s/<stage> | s | max | Seconds of a stage of the step, or of its agent loops.
timing_per_token_ms/<stage> | ms | mean | Milliseconds of a stage per token.
perf/total_num_tokens | tokens | sum | Tokens of the step, prompts included.
perf/time_per_step | s | max | Seconds of the step.
perf/throughput | tokens/s | mean | Tokens per second and device.
perf/mfu/<role> | ratio | mean | Model FLOPs utilisation, where the peak is known.
perf/cpu_memory_used_gb | GiB | max | Largest resident memory of this process so far.
perf/max_memory_allocated_gb | GiB | max | Largest device memory allocated.
perf/max_memory_reserved_gb | GiB | max | Largest device memory reserved.
global_seqlen/<what> | tokens | mean | How evenly tokens are spread over ranks.

## Run
training/global_step | steps | max | Number of the step.
training/epoch | epochs | max | Passes over the data, counted from 0.
tripwire/<name> | count | sum | Times a warning sign has shown so far.

## Supervised training
train/loss | nats | mean | Mean loss per trained token.
train/grad_norm | 1 | mean | Gradient norm before clipping.
train/lr | 1 | mean | Learning rate.
train/lr(1e-3) | 1e-3 | mean | Learning rate in thousandths.
train/mfu | ratio | mean | Model FLOPs utilisation, where the peak is known.
train/global_tokens | tokens | sum | Tokens of the step.
train/trained_tokens | tokens | sum | Tokens that carry loss.
train/total_tokens(B) | 1e9 tokens | max | Tokens since the start.
train/time(s) | s | max | Seconds of the step.
train/tokens_per_second | tokens/s | mean | Tokens per second.
train/accuracy | ratio | mean | Reward models: pairs whose chosen side scores higher.
train/margin | reward | mean | Reward models: score of the chosen side less the other.
"""
"""A line is a metric, an indented one goes on with its sentence. A row that combines as `mean, max,
min` stands for three metrics of these names: "Mean ...", "Largest ..." and "Smallest ...".
"""


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


_SPREAD = {"mean": "Mean", "max": "Largest", "min": "Smallest"}


def _section(text: str) -> Section:
    title, *rows = re.sub(r"\n +", " ", text.strip()).split("\n")
    metrics: list[DeclaredMetric] = []
    for row in rows:
        name, unit, combine, meaning = row.split(" | ", 3)
        if ", " in combine:
            metrics += [
                DeclaredMetric(f"{name}/{kind}", unit, AggregationType(kind), f"{word} {meaning}")
                for kind, word in _SPREAD.items()
            ]
        else:
            metrics.append(DeclaredMetric(name, unit, AggregationType(combine), meaning))
    return Section(title, tuple(metrics))


SECTIONS = tuple(map(_section, TABLE.split("## ")[1:]))

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
