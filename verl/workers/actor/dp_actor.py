"""The policy: log-probabilities of responses, and the update that makes good ones likelier."""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.algos.aggregate import agg_loss
from verl.algos.kl import kl_penalty
from verl.algos.policy_losses.preparation import prepare_loss
from verl.algos.registry import get_policy_loss_fn
from verl.config.actor import FSDPActorConfig
from verl.utils.metric import Metric
from verl.workers.engine.base import BaseEngine, Columns, MicroBatching, TrainResult
from verl.workers.mini_batch import global_counts, merge_reports, mini_batches


class DataParallelPPOActor:
    """Scores and updates the policy that `engine` holds."""

    def __init__(self, config: FSDPActorConfig, engine: BaseEngine) -> None:
        self.config = config
        self.engine = engine
        self.policy_loss = get_policy_loss_fn(config.policy_loss.loss_mode)

    def compute_log_prob(
        self, data: TensorDict, *, micro_batching: MicroBatching, temperature: float
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
    ) -> dict[str, Any]:
        """Go over the batch `ppo_epochs` times, one optimizer step per mini-batch.

        `old_policy_version` is the engine's version when `old_log_probs` were computed. While it is
        still current, old and new policy are the same, and the ratio is exactly 1 by construction.
        """
        config = self.config
        seed = config.data_loader_seed if config.shuffle else None
        results = [
            self._step(mini_batch, temperature, old_policy_version)
            for mini_batch in mini_batches(
                data, rows_per_step, epochs=config.ppo_epochs, shuffle_seed=seed
            )
        ]
        self.engine.lr_scheduler_step()
        return summarise(results)

    def _step(
        self, mini_batch: TensorDict, temperature: float, old_policy_version: int | None
    ) -> tuple[TrainResult, dict[str, Metric]]:
        config = self.config
        mask = mini_batch["response_mask"]
        config.global_batch_info = dict(global_counts(mask, config.loss_scale_factor))
        is_on_policy = old_policy_version == self.engine.policy_version
        prepared = prepare_loss(
            self.policy_loss,
            old_log_prob=mini_batch["old_log_probs"],
            advantages=mini_batch["advantages"],
            response_mask=mask,
            config=config,
        )
        mini_batch = mini_batch.copy().update(prepared)
        weights: list[float] = []

        def loss(columns: Columns, rows: TensorDict) -> tuple[Tensor, dict[str, float]]:
            weights.append(float(rows["response_mask"].sum()))
            return self._loss(columns, rows, tuple(prepared), is_on_policy)

        result = self.engine.train_batch(
            mini_batch, loss, micro_batching=self._micro_batching(), temperature=temperature
        )
        return result, merge_reports(result.metrics, weights)

    def _loss(
        self, columns: Columns, rows: TensorDict, prepared: tuple[str, ...], is_on_policy: bool
    ) -> tuple[Tensor, dict[str, float]]:
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
        report = {**report, "actor/pg_loss": float(loss.detach())}
        drift = ((log_prob.detach() - stored).abs() * mask).sum() / mask.sum().clamp_min(1)
        if is_on_policy:
            report["actor/old_log_prob_error"] = float(drift)
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * self._aggregate(entropy, mask)
        mean_entropy = (entropy.detach() * mask).sum() / mask.sum().clamp_min(1)
        report["actor/entropy"] = float(mean_entropy)
        if config.use_kl_loss:
            kl = kl_penalty(log_prob, rows["ref_log_prob"], config.kl_loss_type)
            kl_loss = self._aggregate(kl, mask)
            loss = loss + config.kl_loss_coef * kl_loss
            report["actor/kl_loss"] = float(kl_loss.detach())
        return loss, report

    def _aggregate(self, values: Tensor, mask: Tensor) -> Tensor:
        return agg_loss(values, mask, self.config.loss_agg_mode, **self.config.global_batch_info)

    def _micro_batching(self) -> MicroBatching:
        config = self.config
        if config.use_dynamic_bsz:
            return MicroBatching(tokens=config.ppo_max_token_len_per_gpu)
        return MicroBatching(rows=config.ppo_micro_batch_size_per_gpu)


def summarise(results: list[tuple[TrainResult, dict[str, Metric]]]) -> dict[str, Any]:
    """The metrics of one training step from those of its optimizer steps.

    Losses are sums over micro-batches (each is already divided by the counts of its mini-batch) and
    means over optimizer steps; everything else is a mean over response tokens.
    """
    names = {name for _, report in results for name in report}
    metrics: dict[str, Any] = {}
    for name in sorted(names):
        parts = [report[name] for _, report in results if name in report]
        if name.endswith("_loss"):
            totals = [sum(part.values) for part in parts]
            metrics[name] = sum(totals) / len(totals)
        else:
            metrics[name] = Metric.merge(parts).aggregate()
    norms = torch.tensor([result.grad_norm for result, _ in results])
    return {
        **metrics,
        "actor/grad_norm": float(norms.mean()),
        "actor/lr": results[-1][0].learning_rate,
        "actor/num_optimizer_steps": sum(result.is_applied for result, _ in results),
        "actor/num_skipped_steps": sum(not result.is_applied for result, _ in results),
    }
