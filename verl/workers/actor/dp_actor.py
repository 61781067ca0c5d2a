"""The policy and its reference: log-probabilities of responses, and the policy-gradient update."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.algos.aggregate import agg_loss
from verl.algos.components import CE_COMPONENTS, KL_WEIGHTS, weighted_mean
from verl.algos.kl import kl_penalty
from verl.algos.policy_losses.reinforce import bypassed_loss
from verl.algos.policy_losses.sequences import (
    couples_prompts,
    is_on_sequences,
    prepare_sequences,
)
from verl.algos.policy_losses.terms import behaviour_metrics, is_prepared, prepare_loss
from verl.algos.policy_losses.whole_sessions import compares_sequences, prepare_sessions
from verl.algos.registry import get_policy_loss_fn, loss_and_metrics, weights_argument
from verl.algos.sessions import SESSION_INDEX, sequence_tokens
from verl.config.actor import ActorConfig
from verl.models.lora import as_started
from verl.protocol.padded import POLICY_VERSIONS
from verl.utils.metric import Metric
from verl.workers.actor.distiller import Distiller
from verl.workers.engine.base import BaseEngine, Columns, TrainResult
from verl.workers.engine.inputs import PROMPT_INDEX, prompt_groups
from verl.workers.engine.outputs import LOG_PROBS, Outputs
from verl.workers.engine.routes import AUX_LOSS, MISMATCHES, ROUTED_EXPERTS, load_metrics
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

    def __init__(
        self, config: ActorConfig, engine: BaseEngine, distiller: Distiller | None = None
    ) -> None:
        self.config = config
        self.engine = engine
        self.distiller = distiller
        self.policy_loss = get_policy_loss_fn(config.policy_loss.loss_mode)
        self.keeps_prompts_whole = couples_prompts(config)

    def compute_log_prob(
        self, data: TensorDict, *, micro_batching: MicroBatching | Passes, temperature: float
    ) -> Columns:
        """`log_probs` and `entropy` of the response tokens, (B, T) each.

        With `calculate_sum_pi_squared` also `sum_pi_squared`, which some baselines weigh by; with
        `router_replay.mode=R2` also `routed_experts`, which the update replays.
        """
        if self.engine.routes is not None:
            self.engine.routes.records = self.config.router_replay.mode == "R2"
        columns = self.engine.infer_batch(
            data,
            micro_batching=micro_batching,
            temperature=temperature,
            outputs=Outputs(sum_pi_squared=self.config.calculate_sum_pi_squared),
        )
        if self.engine.routes is not None:
            self.engine.routes.records = False
            if MISMATCHES in columns:
                self.engine.routes.check(columns.pop(MISMATCHES).mean().item())
        return columns

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
        them. A rank alone makes its own plan, with `rows_per_step` sessions in a mini-batch, or as
        many prompts where the loss compares their responses.

        `old_policy_version` is the engine's version when `old_log_probs` were computed. While it is
        still current, old and new policy are the same, and the ratio is exactly 1 by construction.
        """
        config, engine = self.config, self.engine
        if config.router_replay.mode == "R3" and ROUTED_EXPERTS not in data.keys():  # noqa: SIM118
            raise ValueError(
                f"actor.router_replay.mode is R3, but the batch has no column {ROUTED_EXPERTS}: "
                "there are rows whose engine or agent loop returned no routes. A loop that changes "
                "sampled ids must return them itself (AgentLoopOutput.routed_experts); else set "
                "mode=R2"
            )
        plan = plan or plan_for_one_rank(
            data,
            engine,
            rows_per_step=rows_per_step,
            epochs=config.ppo_epochs,
            shuffle_seed=config.data_loader_seed if config.shuffle else None,
            micro_batching=self.micro_batching(),
            keeps_prompts_whole=self.keeps_prompts_whole,
        )
        num_columns = data["response_mask"].shape[-1]
        results: list[tuple[TrainResult, dict[str, Metric]]] = []
        for step in plan.steps:
            counts = global_counts(step, num_columns, config.loss_scale_factor)
            config.global_batch_info = dict(counts)
            is_on_policy = old_policy_version == engine.policy_version
            prepared = self._prepared(data, step)
            has_sessions = SESSION_INDEX in data.keys()  # noqa: SIM118 (a TensorDict)
            if is_on_sequences(config) or (has_sessions and compares_sequences(config)):
                prepared |= self._prepared_sequences(
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
                outputs=LOG_PROBS if self.distiller is None else self.distiller.outputs(),
            )
            report = merge_reports(result.metrics, engine.get_data_parallel_group())
            if is_on_policy and "actor/router_mismatch" in report:
                engine.routes.check(report["actor/router_mismatch"].aggregate())
            results.append((result, report))
        engine.lr_scheduler_step()
        metrics = summarise(results, "actor")
        if engine.routes is not None:
            metrics |= load_metrics(engine.routes.load, engine.get_data_parallel_group())
        return metrics

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

    def _prepared_sequences(
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
        is_coupled = is_on_sequences(self.config)
        names = ["old_log_probs", "advantages", "response_mask"]
        further = "ref_log_prob" if is_coupled else "rollout_is_weights"
        names += [name for name in (SESSION_INDEX, further) if name in data.keys()]  # noqa: SIM118
        prompts = torch.tensor(prompt_groups(data), device=log_probs.device)
        rows = data.select(*names).update({"log_probs": log_probs, PROMPT_INDEX: prompts})
        names += ["log_probs", PROMPT_INDEX]
        columns = whole_step_columns(rows, names, step, self.engine)
        common: dict[str, Any] = {
            "log_prob": columns["log_probs"],
            "old_log_prob": columns["old_log_probs"],
            "advantages": columns["advantages"],
            "response_mask": columns["response_mask"],
            "config": self.config,
            further: columns.get(further),
        }
        if is_coupled:
            each_row = torch.arange(len(columns[PROMPT_INDEX]), device=log_probs.device)
            sessions, prompts = columns.get(SESSION_INDEX, each_row), columns[PROMPT_INDEX]
            made = prepare_sequences(session_index=sessions, prompt_index=prompts, **common)
        else:
            made = prepare_sessions(session_index=columns[SESSION_INDEX], **common)
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
            **weights_argument(self.policy_loss, rows.get("rollout_is_weights", None)),
            **{name: rows[name] for name in prepared},
        )
        loss, report = loss_and_metrics(returned)
        report = {**report, NUM_TOKENS: mask.sum(), "actor/pg_loss": loss.detach()}
        if self.distiller is not None and not self.distiller.config.use_task_rewards:
            loss = torch.zeros_like(loss)
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
        parts = [
            weighted_mean(-log_prob, rows[name], component_tokens[name])
            for name in CE_COMPONENTS
            if name in component_tokens
        ]
        if parts:
            ce_loss = torch.stack(parts).sum()
            loss = loss + ce_loss
            report["actor/ce_loss"] = ce_loss.detach()
        if self.distiller is not None:
            part, found = self.distiller.loss(
                columns,
                rows,
                log_prob.detach() if is_on_policy else stored,
                self._aggregate,
                config.global_batch_info,
            )
            loss, report = loss + part, {**report, **found}
        if AUX_LOSS in columns:
            aux_loss = columns[AUX_LOSS].sum() / config.global_batch_info["global_batch_size"]
            loss = loss + self.engine.routes.aux_loss_coef * aux_loss
            report["actor/router_aux_loss"] = aux_loss.detach()
        if MISMATCHES in columns:
            share = columns[MISMATCHES].sum() / config.global_batch_info["global_batch_size"]
            report["actor/router_mismatch"] = share
        return loss, report

    def _aggregate(self, values: Tensor, mask: Tensor) -> Tensor:
        return agg_loss(values, mask, self.config.loss_agg_mode, **self.config.global_batch_info)

    def rows_per_step(self, responses_per_prompt: int) -> int:
        """Sessions of an optimizer step, or prompts where the loss compares their responses;
        demonstrations count in both."""
        units = self.config.ppo_mini_batch_size
        if not self.keeps_prompts_whole:
            units *= responses_per_prompt
        return units + self.config.sft_replay.num_rows

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
