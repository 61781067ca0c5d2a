"""PRIME's stages: token rewards of the implicit model in `annotate`, its advantages in
`assign_credit`.

    rollout -> score -> annotate                                          -> assign_credit -> update
               outcome   log-probs; reference, implicit model: rm_scores     two rewards

The implicit model sees a batch after its prompts were chosen and its responses graded, so it is
trained on exactly the rows that the policy is trained on.
"""

import math

import torch
from torch import Tensor

from verl.algos.prime import (
    PrimeWeights,
    implicit_rewards,
    pair_accuracy,
    prime_advantage,
    shaped_rewards,
)
from verl.config.ppo import PPOConfig
from verl.config.reward import FSDPRewardModelConfig
from verl.protocol import DataProto
from verl.protocol.padded import SESSION_UID
from verl.trainer.ppo.context import StepContext
from verl.trainer.ppo.placing import REWARD_POOL, pool_of
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.ppo.tripwires import require_finite
from verl.trainer.ppo.utils import Role
from verl.trainer.recipes.prime_worker import (
    ACCURACY,
    LOG_PROBS,
    REF_LOG_PROBS,
    TEMPERATURE,
    ImplicitRewardWorker,
)
from verl.trainer.task_runner import TaskRunner

SCORES = "rm_scores"


class PrimeTrainer(PPOTrainer):
    """PPO whose advantages come from outcomes and from an implicit model's token rewards."""

    def init_workers(self) -> None:
        super().init_workers()
        self.checkpoint_manager.roles["reward_model"] = self.rm_wg

    def annotate(self, batch: DataProto, step: StepContext) -> DataProto:
        """`rm_scores` and `acc` too; the implicit model is trained as its `update` option says."""
        batch = super().annotate(batch, step)
        refuse_split_sessions(batch)
        batch.batch[ACCURACY] = outcomes(batch)
        with step.report.timed("reward_model"):
            batch = self._with_reference(batch)
            batch = self._with_token_rewards(batch, step)
        require_finite(batch, SCORES)
        return batch

    def _with_reference(self, batch: DataProto) -> DataProto:
        section = self.config.reward_model
        assert isinstance(section, FSDPRewardModelConfig)  # validation refuses others
        if section.model.ref_type == "policy":
            batch.meta_info[TEMPERATURE] = self.config.actor_rollout_ref.rollout.temperature
            batch.batch[REF_LOG_PROBS] = batch.batch["old_log_probs"].clone()
            return batch
        batch.meta_info[TEMPERATURE] = 1.0
        return batch.union(self.rm_wg.compute_ref_log_prob(batch))

    def _with_token_rewards(self, batch: DataProto, step: StepContext) -> DataProto:
        """`rm_scores`, from the model before, during or after its update."""
        section = self.config.reward_model
        assert isinstance(section, FSDPRewardModelConfig)
        update, found = section.model.update, DataProto()
        if update in ("reverse", "none"):
            found = self.rm_wg.compute_rm_log_prob(batch)
        if update != "none":
            trained = self.rm_wg.update_rm(batch)
            step.report.merge(trained.meta_info.pop("metrics"))
            found = trained if update == "after" else found
        if update == "before":
            found = self.rm_wg.compute_rm_log_prob(batch)
        mask = batch.batch["response_mask"]
        rewards = implicit_rewards(
            found.batch[LOG_PROBS], batch.batch[REF_LOG_PROBS], mask, beta=section.model.beta_train
        )
        self._report(rewards.sum(-1), batch, step)
        batch.batch[SCORES] = shaped_rewards(
            rewards, mask, granularity=section.prime_granularity, norm=section.prime_norm
        )
        return batch

    def _report(self, logits: Tensor, batch: DataProto, step: StepContext) -> None:
        accuracy = batch.batch[ACCURACY]
        is_right = (logits > 0) == (accuracy > 0.5)
        step.report.add("reward_model/reward", logits.mean().item())
        step.report.add("reward_model/dpo_acc_abs", is_right.float().mean().item())
        pairs = pair_accuracy(logits, accuracy, batch.non_tensor_batch["uid"])
        if not math.isnan(pairs):
            step.report.add("reward_model/dpo_acc", pairs)

    def assign_credit(self, batch: DataProto, step: StepContext) -> DataProto:
        """Rewards and the rollout's correction as usual; then PRIME's advantages and returns."""
        batch = super().assign_credit(batch, step)
        algorithm = self.config.algorithm
        with step.report.timed("adv"):
            batch.batch["advantages"], batch.batch["returns"] = prime_advantage(
                batch.batch[SCORES],
                batch.batch[ACCURACY],
                batch.batch["response_mask"],
                batch.non_tensor_batch["uid"],
                PrimeWeights(
                    process=algorithm.reward_dpo_coef,
                    outcome=algorithm.reward_gt_coef,
                    is_scaled=algorithm.prime_baseline == "scaled",
                ),
            )
        require_finite(batch, "advantages", "returns")
        return batch


class PrimeRunner(TaskRunner):
    """Trains a policy and the implicit reward model that rewards its tokens."""

    trainer_class = PrimeTrainer

    def add_reward_model_worker(self, config: PPOConfig) -> None:
        self.role_worker_mapping[Role.RewardModel] = ImplicitRewardWorker
        has_pool = config.reward_model.enable_resource_pool
        self.mapping[Role.RewardModel] = (
            REWARD_POOL if has_pool else pool_of(config, "reward_model")
        )


def outcomes(batch: DataProto) -> Tensor:
    """(B,) in [0, 1]: `acc` as graders report it, else the score."""
    scores = batch.batch["token_level_scores"].sum(-1)
    reported = batch.non_tensor_batch.get(ACCURACY)
    values = scores if reported is None else torch.tensor([float(v) for v in reported]).to(scores)
    outside = values[(values < 0) | (values > 1)]
    if len(outside):
        what = "the score" if reported is None else "acc"
        raise ValueError(
            f"{what} of a response is {outside[0].item():g}; PRIME trains its reward model on how "
            "right a response is, from 0 to 1: let the reward function return that, or report it "
            'as "acc" beside its score'
        )
    return values


def refuse_split_sessions(batch: DataProto) -> None:
    names = batch.non_tensor_batch.get(SESSION_UID)
    if names is not None and len(set(names)) < len(names):
        raise ValueError(
            f"{len(names)} rows are {len(set(names))} sessions; PRIME's reward model reads a whole "
            "response in one row: use agent loops that neither fork nor compact conversations"
        )
