"""The policy and its reference: log-probabilities of responses, and the policy-gradient update."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from verl.algos.aggregate import agg_loss
from verl.algos.components import CE_WEIGHTS, KL_WEIGHTS, weighted_mean
from verl.algos.kl import kl_penalty
from verl.algos.policy_losses.reinforce import bypassed_loss
from verl.algos.policy_losses.terms import behaviour_metrics, is_prepared, prepare_loss
from verl.algos.policy_losses.whole_sessions import compares_sequences, prepare_sessions
from verl.algos.registry import get_policy_loss_fn, loss_and_metrics
from verl.algos.sessions import SESSION_INDEX, sequence_tokens
from verl.config.actor import FSDPActorConfig
from verl.models.lora import as_started
from verl.protocol.padded import POLICY_VERSIONS
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


class Policy:
    """Log-probabilities and updates of the policy that `engine` holds."""

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

        On several ranks `data` is this rank's chunk and `plan` has the rows of each step, on all of
        them. A rank alone makes its own plan, with `rows_per_step` rows in a mini-batch.

        `old_policy_version` is the engine's version when `old_log_probs` were computed. While it is
        still current, old and new policy are the same, and the ratio is exactly 1 by construction.
        """
        config, engine = self.config, self.engine
        plan = plan or plan_for_one_rank(
            data,
            engine,
            rows_per_step=rows_per_step,
            epochs=config.ppo_epochs,
            shuffle_seed=config.data_loader_seed if config.shuffle else None,
            micro_batching=self.micro_batching(),
        )
        num_columns = data["response_mask"].shape[-1]
        results: list[tuple[TrainResult, dict[str, Metric]]] = []
        for step in plan.steps:
            counts = global_counts(step, num_columns, config.loss_scale_factor)
            config.global_batch_info = dict(counts)
            is_on_policy = old_policy_version == engine.policy_version
            prepared = self._prepared(data, step)
            if SESSION_INDEX in data.keys() and compares_sequences(config):  # noqa: SIM118
                prepared |= self._prepared_sessions(
                    data, step, temperature=temperature, is_on_policy=is_on_policy
                )
            result = engine.train_batch(
                data.copy().update(prepared),
                partial(
                    self.loss,
                    prepared=tuple(prepared),
                    is_on_policy=is_on_policy,
                    component_tokens=step.component_tokens,
                ),
                micro_batching=step.passes[engine.get_data_parallel_rank()],
                temperature=temperature,
            )
            report = merge_reports(result.metrics, engine.get_data_parallel_group())
            results.append((result, report))
        engine.lr_scheduler_step()
        return summarise(results, "actor")

    def _prepared(self, data: TensorDict, step: StepPlan) -> dict[str, Tensor]:
        """Columns that the loss wants made from all rows of the step, those of all ranks."""
        loss_fn = bypassed_loss(self.config)
        if not is_prepared(loss_fn):
            return {}
        names = ("old_log_probs", "advantages", "response_mask")
        old_log_prob, advantages, mask = whole_step_columns(data, names, step, self.engine).values()
        made = prepare_loss(
            loss_fn,
            old_log_prob=old_log_prob,
            advantages=advantages,
            response_mask=mask,
            config=self.config,
        )
        return self._own_rows(data, step, made)

    def _prepared_sessions(
        self, data: TensorDict, step: StepPlan, *, temperature: float, is_on_policy: bool
    ) -> dict[str, Tensor]:
        """Columns of a loss on whole sequences, from all rows of the sessions of the step.

        Costs a forward pass over the step's rows, except on-policy, where all ratios are 1.
        """
        log_probs = data["old_log_probs"]
        if not is_on_policy:
            passes = step.passes[self.engine.get_data_parallel_rank()]
            found = self.engine.infer_batch(data, micro_batching=passes, temperature=temperature)
            log_probs = found["log_probs"].to(log_probs.device)
        names = ["old_log_probs", "advantages", "response_mask", SESSION_INDEX]
        names += [name for name in ("rollout_is_weights",) if name in data.keys()]  # noqa: SIM118
        rows = data.select(*names).update({"log_probs": log_probs})
        columns = whole_step_columns(rows, [*names, "log_probs"], step, self.engine)
        made = prepare_sessions(
            log_prob=columns["log_probs"],
            old_log_prob=columns["old_log_probs"],
            advantages=columns["advantages"],
            response_mask=columns["response_mask"],
            session_index=columns[SESSION_INDEX],
            config=self.config,
            rollout_is_weights=columns.get("rollout_is_weights"),
        )
        return self._own_rows(data, step, made)

    def _own_rows(
        self, data: TensorDict, step: StepPlan, made: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Of columns over all rows of a step, this rank's, in their places; 0 for other rows."""
        rows = step.rows_of(self.engine.get_data_parallel_rank())
        columns = {}
        for name, values in made.items():
            columns[name] = values.new_zeros(len(data), *values.shape[1:])
            columns[name][rows] = values[: len(rows)]
        return columns

    def loss(
        self,
        columns: Columns,
        rows: TensorDict,
        *,
        prepared: tuple[str, ...],
        is_on_policy: bool,
        component_tokens: Mapping[str, int],
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss of some rows, divided by the counts in `config.global_batch_info`, and its
        further components (`verl.algos.components`), each divided by its `component_tokens`.

        `prepared` are columns that the policy loss asked for. On-policy, old and new are the same.
        """
        config = self.config
        config.global_batch_info = {**config.global_batch_info, **sequence_tokens(rows)}
        log_prob, entropy, mask = columns["log_probs"], columns["entropy"], rows["response_mask"]
        stored = rows["old_log_probs"]
        returned = self.policy_loss(
            old_log_prob=log_prob.detach() if is_on_policy else stored,
            log_prob=log_prob,
            advantages=rows["advantages"],
            response_mask=mask,
            loss_agg_mode=config.loss_agg_mode,
            config=config,
            rollout_is_weights=rows.get("rollout_is_weights", None),
            **{name: rows[name] for name in prepared},
        )
        loss, report = loss_and_metrics(returned)
        report = {**report, NUM_TOKENS: mask.sum(), "actor/pg_loss": loss.detach()}
        drift = ((log_prob.detach() - stored).abs() * mask).sum() / mask.sum().clamp_min(1)
        if is_on_policy:
            report["actor/old_log_prob_error"] = drift
        if POLICY_VERSIONS in rows.keys():  # noqa: SIM118 (a TensorDict)
            sampled = rows["rollout_log_probs"]
            report |= behaviour_metrics(log_prob.detach(), sampled, mask, config)
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * self._aggregate(entropy, mask)
        mean_entropy = (entropy.detach() * mask).sum() / mask.sum().clamp_min(1)
        report["actor/entropy"] = mean_entropy
        if config.use_kl_loss:
            kl = kl_penalty(log_prob, rows["ref_log_prob"], config.kl_loss_type)
            if KL_WEIGHTS in component_tokens:
                kl_loss = weighted_mean(kl, rows[KL_WEIGHTS], component_tokens[KL_WEIGHTS])
            else:
                kl_loss = self._aggregate(kl, mask)
            loss = loss + config.kl_loss_coef * kl_loss
            report["actor/kl_loss"] = kl_loss.detach()
            report["actor/kl_coef"] = config.kl_loss_coef
        if CE_WEIGHTS in component_tokens:
            ce_loss = weighted_mean(-log_prob, rows[CE_WEIGHTS], component_tokens[CE_WEIGHTS])
            loss = loss + ce_loss
            report["actor/ce_loss"] = ce_loss.detach()
        return loss, report

    def _aggregate(self, values: Tensor, mask: Tensor) -> Tensor:
        return agg_loss(values, mask, self.config.loss_agg_mode, **self.config.global_batch_info)

    def micro_batching(self) -> MicroBatching:
        """How the rows of a step are split into micro-batches."""
        config = self.config
        return MicroBatching.of(
            by_tokens=config.use_dynamic_bsz,
            tokens=config.ppo_max_token_len_per_gpu,
            rows=config.ppo_micro_batch_size_per_gpu,
            ranks_per_sequence=self.engine.ranks_per_sequence,
        )


DataParallelPPOActor = Policy
"""The name that verl's users know."""


class Reference:
    """The frozen policy that updates are held close to.

    With LoRA `engine` may be the policy's own; its adapters are off, or as training started, while
    the reference computes.
    """

    def __init__(self, engine: BaseEngine) -> None:
        self.engine = engine

    def compute_log_prob(
        self, data: TensorDict, *, micro_batching: MicroBatching | Passes, temperature: float
    ) -> Tensor:
        """(B, T), log-probabilities of the response tokens."""
        with as_started(self.engine.module):
            columns = self.engine.infer_batch(
                data, micro_batching=micro_batching, temperature=temperature
            )
        return columns["log_probs"]
