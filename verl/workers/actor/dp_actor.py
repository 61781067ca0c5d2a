"""The policy: log-probabilities of responses, and the update that makes good ones likelier."""

from typing import Any

from tensordict import TensorDict
from torch import Tensor

from verl.algos.aggregate import agg_loss
from verl.algos.kl import kl_penalty
from verl.algos.policy_losses.terms import is_prepared, prepare_loss
from verl.algos.registry import get_policy_loss_fn
from verl.config.actor import FSDPActorConfig
from verl.utils.metric import Metric
from verl.workers.engine.base import BaseEngine, Columns, TrainResult
from verl.workers.mini_batch import (
    NUM_TOKENS,
    global_counts,
    merge_reports,
    plan_for_one_rank,
    summarise,
    whole_step_columns,
)
from verl.workers.schedule import MicroBatching, Passes, StepPlan, UpdatePlan


class DataParallelPPOActor:
    """Scores and updates the policy that `engine` holds."""

    def __init__(self, config: FSDPActorConfig, engine: BaseEngine) -> None:
        self.config = config
        self.engine = engine
        self.policy_loss = get_policy_loss_fn(config.policy_loss.loss_mode)

    def compute_log_prob(
        self, data: TensorDict, *, micro_batching: MicroBatching | Passes, temperature: float
    ) -> Columns:
        """`log_probs` and `entropy` of the response tokens, (B, T) each.

        With `calculate_sum_pi_squared` also `sum_pi_squared`, which some baselines weigh by.
        """
        return self.engine.infer_batch(
            data,
            micro_batching=micro_batching,
            temperature=temperature,
            with_sum_pi_squared=self.config.calculate_sum_pi_squared,
        )

    def update_policy(
        self,
        data: TensorDict,
        *,
        rows_per_step: int,
        temperature: float,
        old_policy_version: int | None = None,
        plan: UpdatePlan | None = None,
    ) -> dict[str, Any]:
        """Go over the batch `ppo_epochs` times, one optimizer step per mini-batch.

        On several ranks `data` is this rank's chunk and `plan` says what is in each step, on all of
        them. A rank that is alone makes its own, with `rows_per_step` rows in a mini-batch.

        `old_policy_version` is the engine's version when `old_log_probs` were computed. While it is
        still current, old and new policy are the same, and the ratio is exactly 1 by construction.
        """
        config = self.config
        plan = plan or plan_for_one_rank(
            data,
            self.engine,
            rows_per_step=rows_per_step,
            epochs=config.ppo_epochs,
            shuffle_seed=config.data_loader_seed if config.shuffle else None,
            micro_batching=self.micro_batching(),
        )
        results = [self._step(data, step, temperature, old_policy_version) for step in plan.steps]
        self.engine.lr_scheduler_step()
        return summarise(results, "actor")

    def _step(
        self,
        data: TensorDict,
        step: StepPlan,
        temperature: float,
        old_policy_version: int | None,
    ) -> tuple[TrainResult, dict[str, Metric]]:
        config, engine = self.config, self.engine
        num_columns = data["response_mask"].shape[-1]
        config.global_batch_info = dict(global_counts(step, num_columns, config.loss_scale_factor))
        is_on_policy = old_policy_version == engine.policy_version
        prepared = self._prepared(data, step)

        def loss(columns: Columns, rows: TensorDict) -> tuple[Tensor, dict[str, Any]]:
            return self.loss(columns, rows, prepared=tuple(prepared), is_on_policy=is_on_policy)

        result = engine.train_batch(
            data.copy().update(prepared),
            loss,
            micro_batching=step.passes[engine.get_data_parallel_rank()],
            temperature=temperature,
        )
        return result, merge_reports(result.metrics, engine.get_data_parallel_group())

    def _prepared(self, data: TensorDict, step: StepPlan) -> dict[str, Tensor]:
        """Columns that the loss wants made from all rows of the step, those of all ranks."""
        if not is_prepared(self.policy_loss):
            return {}
        names = ("old_log_probs", "advantages", "response_mask")
        old_log_prob, advantages, mask = whole_step_columns(data, names, step, self.engine).values()
        made = prepare_loss(
            self.policy_loss,
            old_log_prob=old_log_prob,
            advantages=advantages,
            response_mask=mask,
            config=self.config,
        )
        rows = step.rows_of(self.engine.get_data_parallel_rank())
        columns = {}
        for name, values in made.items():
            columns[name] = values.new_zeros(len(data), *values.shape[1:])
            columns[name][rows] = values[: len(rows)]
        return columns

    def loss(
        self, columns: Columns, rows: TensorDict, *, prepared: tuple[str, ...], is_on_policy: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss of some rows, divided by the counts in `config.global_batch_info`.

        `prepared` are columns that the policy loss asked for. On-policy, old and new are the same.
        """
        config = self.config
        log_prob, entropy, mask = columns["log_probs"], columns["entropy"], rows["response_mask"]
        stored = rows["old_log_probs"]
        loss, report = self.policy_loss(
            old_log_prob=log_prob.detach() if is_on_policy else stored,
            log_prob=log_prob,
            advantages=rows["advantages"],
            response_mask=mask,
            loss_agg_mode=config.loss_agg_mode,
            config=config,
            rollout_is_weights=rows.get("rollout_is_weights", None),
            **{name: rows[name] for name in prepared},
        )
        report = {**report, NUM_TOKENS: mask.sum(), "actor/pg_loss": loss.detach()}
        drift = ((log_prob.detach() - stored).abs() * mask).sum() / mask.sum().clamp_min(1)
        if is_on_policy:
            report["actor/old_log_prob_error"] = drift
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * self._aggregate(entropy, mask)
        mean_entropy = (entropy.detach() * mask).sum() / mask.sum().clamp_min(1)
        report["actor/entropy"] = mean_entropy
        if config.use_kl_loss:
            kl = kl_penalty(log_prob, rows["ref_log_prob"], config.kl_loss_type)
            kl_loss = self._aggregate(kl, mask)
            loss = loss + config.kl_loss_coef * kl_loss
            report["actor/kl_loss"] = kl_loss.detach()
        return loss, report

    def _aggregate(self, values: Tensor, mask: Tensor) -> Tensor:
        return agg_loss(values, mask, self.config.loss_agg_mode, **self.config.global_batch_info)

    def micro_batching(self) -> MicroBatching:
        """How the rows of a step are cut into passes."""
        config = self.config
        if config.use_dynamic_bsz:
            tokens = config.ppo_max_token_len_per_gpu * self.engine.ranks_per_sequence
            return MicroBatching(tokens=tokens)
        return MicroBatching(rows=config.ppo_micro_batch_size_per_gpu)
