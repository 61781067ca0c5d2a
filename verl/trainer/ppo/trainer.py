"""`PPOTrainer`: the loop. A step is five stages, each of which a recipe may override.

    rollout -> score -> annotate -> assign_credit -> update

A stage takes the batch and the context of the step, and returns the batch with more columns
(docs/batch.md lists them); it may drop rows. It reports into `step.report`. What happens between
steps (validation, checkpoints, tracking) is in `verl.trainer.ppo.session`.
"""

from collections.abc import Sequence
from functools import partial
from typing import cast

import numpy as np

from verl.agent_loop.buffer import Taken
from verl.agent_loop.rollouter import RolloutOptions, new_groups
from verl.agent_loop.sessions import require_working_world
from verl.algos.components import POSITIVE_WEIGHTS, positive_weights
from verl.algos.rollout_correction.apply import (
    apply_bypass_mode,
    compute_rollout_correction_and_add_to_batch,
)
from verl.algos.sessions import one_row_per_session
from verl.config.algorithm import RolloutCorrectionConfig
from verl.config.convert import to_dictconfig
from verl.config.correction import correction_of, require_correction
from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.protocol.padded import POLICY_VERSIONS
from verl.protocol.trajectory import Group, Score, Trajectory
from verl.trainer.ppo.audit import audit
from verl.trainer.ppo.context import StepBatch, StepContext
from verl.trainer.ppo.credit import apply_kl_penalty, compute_advantage
from verl.trainer.ppo.metric_utils import calculate_debug_metrics, groups_without_spread
from verl.trainer.ppo.own_loop import OwnLoopRecord
from verl.trainer.ppo.reward import has_built_in_scores
from verl.trainer.ppo.scoring import reported_metrics, score_batch
from verl.trainer.ppo.session import TrainingRun
from verl.trainer.ppo.tripwires import require_finite
from verl.utils.torch_functional import masked_mean

ROW_COLUMN = "__row__"


class PPOTrainer(TrainingRun):
    """Trains a policy by reinforcement learning, whatever the estimator and the loss."""

    def init_workers(self) -> None:
        """A trainer with a loop of its own finds a DictConfig in `self.config` from then on."""
        super().init_workers()
        if not type(self).fit.__module__.startswith("verl."):
            self._record_own_loop()
            self.config = cast(PPOConfig, to_dictconfig(self.config))

    def _record_own_loop(self) -> None:
        if self.board.is_wanted:
            trainer, group = self.config.trainer, self.actor_rollout_wg
            record = OwnLoopRecord(self.board, trainer.project_name, trainer.experiment_name)
            vars(group)["update_actor"] = record.observed(group.update_actor)
            vars(self)["fit"] = partial(record.run, self.fit)

    def fit(self) -> None:
        """Train from where the last checkpoint left off until the last step, or the last row."""
        with self.session():
            self._load_checkpoint()
            self.validate_at_start()
            for step in self.steps():
                batch = self.guarded(self.train_step, step)
                self.finish_step(batch, step)
            self.finish_run()

    def train_step(self, step: StepContext) -> DataProto:
        batch = self.rollout(step)  # responses and the log-probs they were sampled with
        batch = self.score(batch, step)  # one score per response
        batch = self.annotate(batch, step)  # log-probs under the old and reference policies, values
        batch = self.assign_credit(batch, step)  # KL penalty, advantages, returns
        return self.update(batch, step)  # critic, actor; then the rollouts see the new weights

    # ---- rollout ---------------------------------------------------------------------------------

    def rollout(self, step: StepContext) -> DataProto:
        """`rollout.n` responses per prompt; with dynamic sampling, to prompts worth training."""
        rollout = self.config.actor_rollout_ref.rollout
        is_filtered = self.buffer.policy.reads_grades
        settle = partial(self._settle_grades, step) if is_filtered else None
        with step.report.timed("gen"):
            for num_prompts in self.buffer.demands(step.step, settle):
                prompts = self.draw_prompts(step, num_prompts)
                groups = new_groups(prompts, rollout.n, step=step.step, seed_of=step.seed_of)
                self._submit(groups, step.step)
            taken = self.buffer.take(step.step)
            require_working_world(taken.groups, rollout.multi_turn.max_infra_ratio)
            step.groups = taken.groups
            batch = StepBatch(taken.groups, self.padding).data
            self._report_rollout(taken, step)
            if self.config.algorithm.adv_estimator == "remax":
                batch = self._with_greedy_baselines(batch, step)
        if rollout.free_cache_engine:
            with step.report.timed("sleep"):
                self.async_rollout_manager.sleep()
        return batch

    def _report_rollout(self, taken: Taken, step: StepContext) -> None:
        groups = [*taken.groups, *taken.discarded]
        metrics, seconds = self.rollouter.take_report(groups)
        step.report.merge(metrics)
        step.report.timing.update(seconds)
        step.report.merge(self.buffer.policy.metrics(taken))

    def _settle_grades(self, step: StepContext, groups: Sequence[Group]) -> None:
        """Give groups their final scores; those that have none leave their group."""
        turns = self.config.actor_rollout_ref.rollout.multi_turn
        require_working_world(groups, turns.max_infra_ratio)
        step.groups = list(groups)
        batch = StepBatch(step.groups, self.padding)
        batch.data.non_tensor_batch[ROW_COLUMN] = np.arange(len(batch.data))
        scored = self.score(batch.data, step)
        rewards = scored.batch["token_level_scores"]
        names = scored.meta_info["reward_extra_keys"]
        rows = scored.non_tensor_batch[ROW_COLUMN].tolist()
        for place, (row, total) in enumerate(zip(rows, rewards.sum(-1).tolist(), strict=True)):
            extras = {name: scored.non_tensor_batch[name][place] for name in names}
            batch.trajectories[row].grade = Score(total, extras, rewards[place].numpy())
        kept = {id(batch.trajectories[row]) for row in rows}
        for group in groups:
            group.trajectories = [t for t in group.trajectories if id(t) in kept]
            if not group.trajectories:
                group.fault = "its responses could not be scored"

    def _with_greedy_baselines(self, batch: DataProto, step: StepContext) -> DataProto:
        """ReMax: `reward_baselines`, the score of the greedy response; prompts without one go."""
        prompts = [group.trajectories[0] for group in step.groups if group.trajectories]
        greedy = [
            Group(
                index=index,
                uid=first.uid,
                drawn_at=step.step,
                trajectories=[
                    Trajectory(
                        uid=first.uid, sample=0, row=first.row, seed=step.seed_of(first.uid, 0)
                    )
                ],
            )
            for index, first in enumerate(prompts)
        ]
        self.rollouter.generate(greedy, RolloutOptions(step=step.step, does_sample=False))
        turns = self.config.actor_rollout_ref.rollout.multi_turn
        require_working_world(greedy, turns.max_infra_ratio)
        answers = StepBatch(greedy, self.padding).data
        if self.use_rm:
            answers, _ = self.with_model_scores(answers)
        scored = score_batch(answers, self.reward_fn, greedy, self.rollouter.grading).batch
        ends = one_row_per_session(scored)
        totals = ends.batch["token_level_scores"].sum(-1).tolist()
        baseline_of = dict(zip(ends.non_tensor_batch["uid"], totals, strict=True))
        step.groups = [
            group for group in step.groups if group.uid in baseline_of or not group.trajectories
        ]
        uids = batch.non_tensor_batch["uid"]
        num_lost = len(set(uids) - baseline_of.keys())
        step.report.count({"reward/num_groups_set_aside": float(num_lost)})
        batch = batch.select_idxs(np.array([uid in baseline_of for uid in uids]))
        baselines = [baseline_of[uid] for uid in batch.non_tensor_batch["uid"]]
        scores = batch.batch["rollout_log_probs"].new_tensor(baselines)
        batch.batch["reward_baselines"] = scores
        return batch

    # ---- score -----------------------------------------------------------------------------------

    def score(self, batch: DataProto, step: StepContext) -> DataProto:
        """`token_level_scores`; prompts that could not be graded are dropped and counted."""
        if "token_level_scores" in batch.batch.keys():  # noqa: SIM118  # dynamic sampling did it
            return self._with_positive_examples(batch)
        with step.report.timed("reward"):
            if self.use_rm:
                batch, found = self.with_model_scores(batch)
                step.report.merge(found)
            scored = score_batch(batch, self.reward_fn, step.groups, self.rollouter.grading)
            if has_built_in_scores(self.config):
                ratio = self.config.reward_model.audit_ratio
                scored.metrics |= audit(scored.batch, self.tokenizer, ratio)
        step.report.count(scored.metrics)  # dynamic sampling scores several batches
        step.report.add("reward/ratio_groups_without_spread", groups_without_spread(scored.batch))
        step.report.merge(reported_metrics(scored.batch))
        return self._with_positive_examples(scored.batch)

    def _with_positive_examples(self, batch: DataProto) -> DataProto:
        """`positive_weights` on right responses, where `actor.positive_nll_coef` asks for it."""
        actor = self.config.actor_rollout_ref.actor
        if actor.positive_nll_coef:
            batch.batch[POSITIVE_WEIGHTS] = positive_weights(
                batch, actor.positive_nll_coef, actor.positive_nll_min_score
            )
        return batch

    # ---- annotate --------------------------------------------------------------------------------

    def annotate(self, batch: DataProto, step: StepContext) -> DataProto:
        """`old_log_probs`, and `ref_log_prob` and `values` where the algorithm needs them; in a
        distillation also what teachers say, and rows without their answer are dropped."""
        if self.teaching is not None:
            with step.report.timed("teacher"):
                batch, found = self.teaching.annotate(batch, self.teacher_wg)
            step.report.merge(found)
        self._balance_batch(batch, step.report.metrics)
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        batch = self._with_old_log_probs(batch, step)
        mask = batch.batch["response_mask"]
        if self.use_reference_policy:
            with step.report.timed("ref"):
                batch = batch.union(self.ref_policy_wg.compute_ref_log_prob(batch))
            distance = batch.batch["old_log_probs"] - batch.batch["ref_log_prob"]
            step.report.add("actor/ref_kl", masked_mean(distance, mask).item())
            if self.config.actor_rollout_ref.ref.model.path is None:  # else it is another model
                step.report.add("actor/ref_distance", masked_mean(distance.abs(), mask).item())
        if self.use_critic:
            with step.report.timed("values"):
                batch = batch.union(self.critic_wg.compute_values(batch))
        require_finite(batch, "old_log_probs", "ref_log_prob", "values", "teacher_log_probs")
        return batch

    def _with_old_log_probs(self, batch: DataProto, step: StepContext) -> DataProto:
        correction = self._correction(batch)
        if correction.bypass_mode:
            loss = self.config.actor_rollout_ref.actor.policy_loss
            apply_bypass_mode(batch, correction, loss)
            return batch
        if self._sampled_log_probs_will_do(batch, step):
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"].clone()
            return batch
        with step.report.timed("old_log_prob"):
            found = self.actor_rollout_wg.compute_log_prob(batch)
        step.report.merge(found.meta_info.pop("metrics"))
        entropys = found.batch.pop("entropys")
        entropy = masked_mean(entropys, batch.batch["response_mask"])
        step.report.add("actor/entropy", entropy.item())
        if self.config.trainer.board:
            batch.batch["entropys"] = entropys
        batch = batch.union(found)
        if "rollout_log_probs" in batch.batch.keys():  # noqa: SIM118
            version = batch.meta_info.get("old_policy_version")
            step.report.merge(calculate_debug_metrics(batch, version))
        return batch

    def _correction(self, batch: DataProto) -> RolloutCorrectionConfig:
        """Weights and rejection of this batch.

        Where tokens have versions, some may be of older policies, and log-probs that the actor
        computes are not those of the policy that sampled: then a correction must be chosen.
        """
        if POLICY_VERSIONS not in batch.batch.keys():  # noqa: SIM118
            return self.config.algorithm.rollout_correction
        if correction_of(self.config) is None:
            mask = batch.batch["response_mask"].bool()
            current = self.actor_rollout_wg.trained_version()[0]
            if (batch.batch[POLICY_VERSIONS][mask] == current).all():
                return self.config.algorithm.rollout_correction
        return require_correction(self.config).settings

    def _sampled_log_probs_will_do(self, batch: DataProto, step: StepContext) -> bool:
        """Whether a pass for `old_log_probs` is left out; counted, so that a curve shows it.

        In exact mode it would return the very numbers that came with the tokens, as long as all of
        them were sampled with the current weights. `use_rollout_log_probs` asks for it outright.
        """
        section = self.config.actor_rollout_ref
        is_exact = section.rollout.exact and "policy_version" in batch.meta_info
        does_ask = section.actor.use_rollout_log_probs
        if POLICY_VERSIONS in batch.batch.keys():  # noqa: SIM118
            choice = correction_of(self.config)
            does_ask = choice is not None and choice.anchor == "behaviour"
            current = self.actor_rollout_wg.trained_version()[0]
            is_exact = is_exact and batch.meta_info["policy_version"] == current
        does_skip = is_exact and not section.actor.calculate_sum_pi_squared
        if does_skip:
            batch.meta_info["old_policy_version"] = batch.meta_info["policy_version"]
        does_skip = does_skip or does_ask
        step.report.add("training/old_log_prob_pass_skipped", float(does_skip))
        return does_skip

    # ---- assign credit ---------------------------------------------------------------------------

    def assign_credit(self, batch: DataProto, step: StepContext) -> DataProto:
        """`token_level_rewards`, `advantages`, `returns`; corrects for a rollout that drifted."""
        algorithm = self.config.algorithm
        assert algorithm.adv_estimator is not None, "a recipe without one assigns credit itself"
        correction = self._correction(batch)
        with step.report.timed("adv"):
            if algorithm.use_kl_in_reward:
                batch, found = apply_kl_penalty(batch, self.kl_ctrl_in_reward, algorithm.kl_penalty)
                step.report.merge(found)
            else:
                batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            if (correction.rollout_is or correction.rollout_rs) and not correction.bypass_mode:
                batch, found = compute_rollout_correction_and_add_to_batch(batch, correction)
                step.report.merge(found)
            batch = compute_advantage(
                batch,
                algorithm.adv_estimator,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                num_repeat=self.config.actor_rollout_ref.rollout.n,
                norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
                config=algorithm,
            )
        require_finite(batch, "token_level_rewards", "advantages", "returns")
        return batch

    # ---- update ----------------------------------------------------------------------------------

    def update(self, batch: DataProto, step: StepContext) -> DataProto:
        """Train the critic, and the actor once that is warm; then the rollout sees the weights."""
        if self.use_critic:
            with step.report.timed("update_critic"):
                found = self.critic_wg.update_critic(batch)
            step.report.merge(found.meta_info["metrics"])
        if self.config.trainer.critic_warmup <= step.step:
            with step.report.timed("update_actor"):
                rows = batch if self.components is None else self.components.add(batch, step.step)
                found = self.actor_rollout_wg.update_actor(rows)
                found.meta_info["metrics"].update(step.publisher.publish())
            # What was measured before the update is about the policy that sampled.
            step.report.merge(found.meta_info["metrics"], keeps_own=True)
            self.buffer.publish(step.step)
        return batch
