"""`PPOTrainer`: the loop. A step is five stages, each of which a recipe may override.

    rollout -> score -> annotate -> assign_credit -> update

A stage takes the batch and returns it with more columns (docs/batch.md lists them); it may drop
rows. It reports into `self.metrics` and `self.timing`, which are new for every step. What happens
between steps (validation, checkpoints, tracking) is in `verl.trainer.ppo.run`.
"""

from typing import Any

import numpy as np

from verl.algos.rollout_correction.apply import (
    apply_bypass_mode,
    compute_rollout_correction_and_add_to_batch,
)
from verl.protocol import DataProto
from verl.trainer.ppo.credit import apply_kl_penalty, compute_advantage
from verl.trainer.ppo.dataloader import EndOfData
from verl.trainer.ppo.dynamic_sampling import fill_batch
from verl.trainer.ppo.mismatch_metrics import calculate_debug_metrics
from verl.trainer.ppo.reporting import groups_without_spread
from verl.trainer.ppo.run import Metrics, TrainingRun
from verl.trainer.ppo.scoring import Scored, reported_metrics, score_batch
from verl.trainer.ppo.seeds import keyed_seed
from verl.trainer.ppo.tripwires import require_finite
from verl.utils.metric import reduce_metrics
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.utils.torch_functional import masked_mean
from verl.workers.rollout.sequences import SEED_COLUMN


class PPOTrainer(TrainingRun):
    """Trains a policy by reinforcement learning, whatever the estimator and the loss."""

    def fit(self) -> None:
        """Train from where the last checkpoint left off until the last step, or the last row."""
        with self.session():
            self._load_checkpoint()
            self.validate_at_start()
            if self.config.trainer.val_only:
                return
            try:
                for prompts in self.prompt_batches():
                    metrics = self.guarded_step(self.train_step, prompts)
                    self.finish_step(metrics)
            except EndOfData as end:
                self.stop_early(end)
            self.finish_run()

    def train_step(self, prompts: DataProto) -> Metrics:
        batch = self.rollout(prompts)  # responses and the log-probs they were sampled with
        batch = self.score(batch)  # one score per response
        batch = self.annotate(batch)  # log-probs under the old and reference policies, values
        batch = self.assign_credit(batch)  # KL penalty, advantages, returns
        return self.update(batch)  # critic, actor; then the rollouts see the new weights

    # ---- rollout ---------------------------------------------------------------------------------

    def rollout(self, prompts: DataProto) -> DataProto:
        """`rollout.n` responses per prompt; with dynamic sampling, to prompts worth training."""
        with self.timed("gen"):
            batch = self.respond(prompts)
        groups = self.config.algorithm.filter_groups
        if groups.enable:
            filled = fill_batch(
                batch,
                config=groups,
                num_prompts=self.config.data.train_batch_size,
                score=self.score,
                generate_more=self._respond_to_more,
            )
            batch = filled.batch
            self.metrics["train/num_gen_batches"] = filled.num_gen_batches
            self.metrics["train/num_groups_dropped"] = filled.num_dropped_groups
        if self.config.actor_rollout_ref.rollout.free_cache_engine:
            self.async_rollout_manager.sleep()
        return batch

    def respond(self, prompts: DataProto) -> DataProto:
        """Responses to each prompt, and what the estimator compares them with."""
        batch = self.generate(prompts, self.config.actor_rollout_ref.rollout.n)
        self.timing.update(batch.meta_info.pop("timing"))
        self.metrics.update(batch.meta_info.pop("metrics"))
        if self.config.algorithm.adv_estimator == "remax":
            batch = self._with_greedy_baselines(batch, prompts)
        return batch

    def generate(self, prompts: DataProto, num_samples: int, **meta_info: Any) -> DataProto:
        """Repeat each prompt and let the agent loops continue it."""
        samples = prompts.repeat(num_samples, interleave=True)
        request = self._get_gen_batch(samples)
        request.meta_info = {"global_steps": self.global_steps, **meta_info}
        key = ("validation",) if meta_info.get("validate") else ("training", self.global_steps)
        seeds = [
            keyed_seed(self.seed, *key, uid, row % num_samples)
            for row, uid in enumerate(samples.non_tensor_batch["uid"])
        ]
        request.non_tensor_batch[SEED_COLUMN] = np.array(seeds, dtype=object)
        return samples.union(self.async_rollout_manager.generate_sequences(request))

    def _respond_to_more(self) -> DataProto:
        with self.timed("gen"):
            return self.respond(self.next_prompts())

    def _with_greedy_baselines(self, batch: DataProto, prompts: DataProto) -> DataProto:
        """ReMax: `reward_baselines`, the score of the greedy response; prompts without one go."""
        greedy = self.generate(prompts, 1, do_sample=False)
        if self.use_rm:
            greedy, _ = self.with_model_scores(greedy)
        scored = score_batch(greedy, self.reward_fn).batch
        totals = scored.batch["token_level_scores"].sum(-1).tolist()
        baseline_of = dict(zip(scored.non_tensor_batch["uid"], totals, strict=True))
        uids = batch.non_tensor_batch["uid"]
        batch = batch.select_idxs(np.array([uid in baseline_of for uid in uids]))
        baselines = [baseline_of[uid] for uid in batch.non_tensor_batch["uid"]]
        scores = batch.batch["rollout_log_probs"].new_tensor(baselines)
        batch.batch["reward_baselines"] = scores
        return batch

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        """The columns that agent loops see."""
        return DataProto(non_tensor_batch=dict(batch.non_tensor_batch))

    # ---- score -----------------------------------------------------------------------------------

    def score(self, batch: DataProto) -> DataProto:
        """`token_level_scores`; prompts that could not be graded are set aside and counted."""
        if "token_level_scores" in batch.batch.keys():  # noqa: SIM118  # dynamic sampling did it
            return batch
        with self.timed("reward"):
            if self.use_rm:
                batch, found = self.with_model_scores(batch)
                self.metrics.update(found)
            scored = score_batch(batch, self.reward_fn)
        return self._report_scores(scored)

    def _report_scores(self, scored: Scored) -> DataProto:
        for name, count in scored.metrics.items():  # dynamic sampling scores several batches
            self.metrics[name] = self.metrics.get(name, 0.0) + count
        self.metrics["reward/ratio_groups_without_spread"] = groups_without_spread(scored.batch)
        self.metrics.update(reported_metrics(scored.batch))
        return scored.batch

    # ---- annotate --------------------------------------------------------------------------------

    def annotate(self, batch: DataProto) -> DataProto:
        """`old_log_probs`, and `ref_log_prob` and `values` where the algorithm needs them."""
        self._balance_batch(batch, self.metrics)
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        batch = self._with_old_log_probs(batch)
        mask = batch.batch["response_mask"]
        if self.use_reference_policy:
            with self.timed("ref"):
                batch = batch.union(self.ref_policy_wg.compute_ref_log_prob(batch))
            distance = batch.batch["old_log_probs"] - batch.batch["ref_log_prob"]
            self.metrics["actor/ref_kl"] = masked_mean(distance, mask).item()
            if self.config.actor_rollout_ref.ref.model.path is None:  # else it is another model
                self.metrics["actor/ref_distance"] = masked_mean(distance.abs(), mask).item()
        if self.use_critic:
            with self.timed("values"):
                batch = batch.union(self.critic_wg.compute_values(batch))
        require_finite(batch, "old_log_probs", "ref_log_prob", "values")
        return batch

    def _with_old_log_probs(self, batch: DataProto) -> DataProto:
        correction = self.config.algorithm.rollout_correction
        if correction.bypass_mode:
            loss = self.config.actor_rollout_ref.actor.policy_loss
            apply_bypass_mode(batch, correction, loss)
            return batch
        if self._sampled_log_probs_will_do(batch):
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"].clone()
            return batch
        with self.timed("old_log_prob"):
            found = self.actor_rollout_wg.compute_log_prob(batch)
        self.metrics.update(reduce_metrics(found.meta_info.pop("metrics")))
        entropy = masked_mean(found.batch.pop("entropys"), batch.batch["response_mask"])
        self.metrics["actor/entropy"] = entropy.item()
        batch = batch.union(found)
        if "rollout_log_probs" in batch.batch.keys():  # noqa: SIM118
            self.metrics.update(calculate_debug_metrics(batch))
        return batch

    def _sampled_log_probs_will_do(self, batch: DataProto) -> bool:
        """Whether a pass for `old_log_probs` is left out; counted, so that a curve shows it.

        In exact mode it would return the very numbers that came with the tokens, as long as all of
        them were sampled with the current weights. `use_rollout_log_probs` asks for it outright.
        """
        section = self.config.actor_rollout_ref
        is_exact = section.rollout.exact and "policy_version" in batch.meta_info
        does_skip = is_exact and not section.actor.calculate_sum_pi_squared
        if does_skip:
            batch.meta_info["old_policy_version"] = batch.meta_info["policy_version"]
        does_skip = does_skip or section.actor.use_rollout_log_probs
        self.metrics["training/old_log_prob_pass_skipped"] = float(does_skip)
        return does_skip

    def _balance_batch(
        self, batch: DataProto, metrics: Metrics, logging_prefix: str = "global_seqlen"
    ) -> None:
        """Report how evenly tokens are spread over ranks; the rows stay in their order.

        Rows are shared out by tokens where they are dealt to ranks (`verl.workers.roles.dispatch`),
        so neither the rows of an optimizer step nor their order depends on the number of ranks.
        """
        lengths = batch.batch["attention_mask"].sum(-1).tolist()
        num_ranks = min(self.actor_rollout_wg.world_size, len(lengths))
        parts = get_seqlen_balanced_partitions(lengths, num_ranks, equal_size=False)
        metrics.update(log_seqlen_unbalance(lengths, parts, logging_prefix))

    # ---- assign credit ---------------------------------------------------------------------------

    def assign_credit(self, batch: DataProto) -> DataProto:
        """`token_level_rewards`, `advantages`, `returns`; corrects for a rollout that drifted."""
        algorithm = self.config.algorithm
        correction = algorithm.rollout_correction
        with self.timed("adv"):
            if algorithm.use_kl_in_reward:
                batch, found = apply_kl_penalty(batch, self.kl_ctrl_in_reward, algorithm.kl_penalty)
                self.metrics.update(found)
            else:
                batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            if (correction.rollout_is or correction.rollout_rs) and not correction.bypass_mode:
                batch, found = compute_rollout_correction_and_add_to_batch(batch, correction)
                self.metrics.update(found)
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

    def update(self, batch: DataProto) -> Metrics:
        """Train the critic, and the actor once that is warm; the rollout shares its weights."""
        self.batch = batch
        if self.use_critic:
            with self.timed("update_critic"):
                found = self.critic_wg.update_critic(batch)
            self.metrics.update(reduce_metrics(found.meta_info["metrics"]))
        if self.config.trainer.critic_warmup <= self.global_steps:
            with self.timed("update_actor"):
                found = self.actor_rollout_wg.update_actor(batch)
                found.meta_info["metrics"].update(self.sync_rollout())
            # What was measured before the update is about the policy that sampled.
            self.metrics = {**reduce_metrics(found.meta_info["metrics"]), **self.metrics}
        return self.metrics
