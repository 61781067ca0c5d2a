"""`AsyncTrainer`: the same stages, with generation going on across steps.

    lag 0 (one set of devices)        lag 1 (devices of their own for generation)
      admit what may start              admit what may start
      take the groups of the step       take the groups of the step
      settle: no row samples            train  |  generation goes on
      train                             settle: once the next step's groups have ended
      publish, rows go on               publish, rows go on

Which groups a step trains on, and which weights sampled which token, follow from the schedule
(`verl.agent_loop.schedule`), not from what happened to be ready.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from verl.agent_loop.buffer import Buffer, OnPolicy
from verl.agent_loop.gate import Gate
from verl.agent_loop.rollouter import Rollouter, new_groups, rollout_loop
from verl.agent_loop.sessions import require_working_world
from verl.algos.policy_losses.terms import clip_range
from verl.algos.rollout_correction.off_policy import off_policy_metrics, reject_stale
from verl.config.async_plan import AsyncPlan, plan_of
from verl.config.correction import correction_of
from verl.protocol import DataProto
from verl.protocol.trajectory import Group
from verl.trainer.ppo.context import StepBatch, StepContext
from verl.trainer.ppo.data import as_prompts
from verl.trainer.ppo.lending import Lending, lending_rule
from verl.trainer.ppo.replicas import expendable_engines
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.ppo.utils import Role
from verl.utils.checkpoint.layout import make_folders
from verl.utils.scramble import keyed_seed
from verl.workers.rollout.base import Rollout
from verl.workers.rollout.kept_cache import measure_step
from verl.workers.rollout.publish import Publisher, SentWeights

TIMELINE = "timeline.jsonl"


class AsyncBuffer(Buffer):
    """A buffer in which the groups of later steps wait; a checkpoint has their rows."""

    gate: Gate

    def __init__(self, batch: int) -> None:
        super().__init__(OnPolicy(batch))
        self.rows: dict[str, Any] = {}
        """Where rows stood when the last update became visible."""

        self.step_versions: list[int] = []
        """The policy's version at the start of every step so far."""

    @property
    def num_ended(self) -> int:
        """Groups that were generated since the run began."""
        return self._state.num_drawn - len(self._state.running)

    def num_running(self, step: int) -> int:
        """Groups of a step that are still generated."""
        with self._changed:
            return self._state.num_running(step)

    def fail(self, error: BaseException) -> None:
        self.gate.fail(error)
        super().fail(error)

    def state_dict(self) -> dict[str, Any]:
        first = self.rows["published"] * self.gate.schedule.plan.batch
        return {
            "num_drawn": first,
            "version": self._state.version,
            "rows": self.rows,
            "step_versions": self.step_versions,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.step_versions = list(state.pop("step_versions"))
        self.gate.load_state_dict(state.pop("rows"))
        super().load_state_dict(state)


class Unpublished(Publisher):
    """In a step nothing is published; that is done once rows are where the update finds them."""

    def publish(self, *, in_flight: bool = False) -> dict[str, float]:
        return {}

    def recover(self, engine: Rollout) -> None:
        raise NotImplementedError("lost engines are recovered by the run's own publisher")

    def keep_published(self) -> None:
        raise NotImplementedError("the run's own publisher keeps what it has published")


class AsyncTrainer(PPOTrainer):
    """Trains on what older policies may have sampled, within the bound of its plan."""

    plan: AsyncPlan
    buffer: AsyncBuffer

    def init_workers(self) -> None:
        super().init_workers()
        plan = plan_of(self.config)
        assert plan is not None
        assert isinstance(self.rollouter, Rollouter), "checked with the configuration"
        assert self.total_training_steps is not None
        self.plan = plan
        if plan.lag:
            self.publisher.keep_published()
        self.buffer = AsyncBuffer(plan.batch)
        rollouter = self.rollouter
        self.gate = self.buffer.gate = rollouter.gate = Gate(
            plan,
            plan.batch * self.total_training_steps,
            rollout_loop(os.getpid()),
            lambda: rollouter.servers.abort_turns(),
        )
        self.lending = self._lent_engines()
        self._num_started = self._num_cut = 0
        self._closed = 0.0
        self._drawn: dict[int, list[Group]] = {}
        self._loader_before: dict[int, dict[str, Any]] = {}

    def _lent_engines(self) -> Lending | None:
        """Engines on the devices of the trainer, for the time that it waits."""
        rule, spec = lending_rule(self.config), self._replica_spec()
        if rule is None or not self.plan.lag:
            return None
        assert spec is not None, "checked with the configuration"
        assert isinstance(self.publisher, SentWeights)
        pool_name = self.resource_pool_manager.mapping[self._policy_role()]
        group = self.placer.start_beside(pool_name, str(Role.Rollout), spec)
        engines = expendable_engines(group, self.config, self.seed)
        servers, loop = self.async_rollout_manager.rollouter.servers, rollout_loop(os.getpid())
        return Lending(rule, group, engines, self.publisher, servers, loop)

    def _waiting(self, num_running: int, step: StepContext) -> AbstractContextManager[None]:
        """While the trainer waits for so many rows."""
        num_rows = self.plan.batch * self.config.actor_rollout_ref.rollout.n
        if self.lending is None:
            return nullcontext()
        return self.lending.while_waiting(num_running / num_rows, step.report)

    def steps(self) -> Iterator[StepContext]:
        for step in super().steps():
            step.publisher = Unpublished()
            yield step

    # ---- rollout ---------------------------------------------------------------------------------

    def rollout(self, step: StepContext) -> DataProto:
        """The groups of this step, and meanwhile rows of later ones."""
        rollout = self.config.actor_rollout_ref.rollout
        with step.report.timed("gen"):
            self._admit()
            num_running = self.buffer.num_running(step.step) * rollout.n
            with self._waiting(num_running, step):
                taken = self.buffer.take(step.step)
            require_working_world(taken.groups, rollout.multi_turn.max_infra_ratio)
            step.groups = taken.groups
            batch = StepBatch(taken.groups, self.padding, with_versions=True).data
            self._report_rollout(taken, step)
        self.buffer.step_versions.append(self.actor_rollout_wg.trained_version()[0])
        if batch.meta_info.get("policy_version") != self.buffer.step_versions[-1]:
            batch.meta_info.pop("policy_version", None)  # older weights sampled it
        if self.plan.lag == 0:
            with step.report.timed("settle"):
                self._settle()
            if self.plan.kv_after_update == "keep":
                self._check_kept_cache(batch, step)
            if rollout.free_cache_engine:
                with step.report.timed("sleep"):
                    self.async_rollout_manager.sleep()
        return batch

    def annotate(self, batch: DataProto, step: StepContext) -> DataProto:
        batch = super().annotate(batch, step)
        step.report.merge(ages_report(batch, **self._ages_options()))
        return batch

    def _ages_options(self) -> dict[str, Any]:
        choice = correction_of(self.config)
        return {
            "step_versions": list(self.buffer.step_versions),
            "is_proximal": choice is None or choice.anchor == "proximal",
            "clip_range": clip_range(self.config.actor_rollout_ref.actor),
        }

    def _admit(self) -> None:
        """Start the groups that may start now, in order."""
        batch, limit = self.plan.batch, self.gate.schedule.limit
        while self._num_started < limit:
            number, first = divmod(self._num_started, batch)
            last = min(batch, limit - number * batch)
            groups = self._groups_of(number + 1)[first:last]
            self._submit(groups, number + 1)
            self._num_started += len(groups)

    def _groups_of(self, step: int) -> list[Group]:
        """The groups of a step, drawn once; the same ones whenever that is."""
        if step not in self._drawn:
            self._loader_before[step] = self.train_dataloader.state_dict()
            prompts = as_prompts(self.train_dataloader.next_batch())
            uids = [f"{step}-{row}" for row in range(len(prompts))]
            prompts.non_tensor_batch["uid"] = np.array(uids, dtype=object)
            seed_of = partial(keyed_seed, self.seed, "training", step)
            num = self.config.actor_rollout_ref.rollout.n
            self._drawn[step] = new_groups(prompts, num, step=step, seed_of=seed_of)
        return self._drawn[step]

    def _check_kept_cache(self, batch: DataProto, step: StepContext) -> None:
        """Measure how far kept keys and values are off; the actor's weights drew the last tokens.

        With a lag the actor is ahead of the engines by then, so nothing can be compared.
        """
        actor, rollout = self.actor_rollout_wg, self.config.actor_rollout_ref.rollout
        step.report.merge(
            measure_step(
                batch.batch,
                lambda rows: actor.score_answers(tuple(rows), rollout.temperature)[0],
                actor.trained_version()[0],
                max_kl=rollout.kv_max_kl,
            )
        )

    # ---- updates ---------------------------------------------------------------------------------

    def update(self, batch: DataProto, step: StepContext) -> DataProto:
        batch.meta_info["publishes"] = False  # engines generate with the weights of before
        return super().update(batch, step)

    def finish_step(self, batch: DataProto | None, step: StepContext) -> None:
        """Make the update visible where it is time to, then report, validate and save."""
        if not self.has_data_ended and step.step >= self.gate.schedule.next_update:
            before = time.perf_counter()
            step.report.merge(self._make_visible(step))
            step.report.timing["step"] += time.perf_counter() - before
        if not self.has_data_ended:
            self._report_waiting(step)
            self._write_timeline(step)
        super().finish_step(batch, step)

    def _make_visible(self, step: StepContext) -> dict[str, float]:
        if self.plan.lag:
            num_running = len(self.gate.schedule.running)
            with step.report.timed("settle"), self._waiting(num_running, step):
                self._settle()
        metrics = self.publisher.publish()
        self.gate.publish()
        for number in [n for n in self._drawn if n <= step.step]:
            del self._drawn[number], self._loader_before[number]
        self._admit()
        return metrics

    def _settle(self) -> None:
        self.gate.settle()
        self.buffer.rows = self.gate.state_dict()

    def _report_waiting(self, step: StepContext) -> None:
        """Who waited for whom, and for how long."""
        timing, gate, report = step.report.timing, self.gate, step.report
        waited = timing["gen"] + timing.get("settle", 0.0)
        closed, num_cut = gate.seconds_closed, gate.num_cut
        report.add("fully_async/total_wait_time", waited)
        report.add("trainer/idle_ratio", waited / timing["step"])
        report.add("rollouter/idle_ratio", min(1.0, (closed - self._closed) / timing["step"]))
        report.add("rollouter/active_time", timing["step"] - (closed - self._closed))
        report.add("fully_async/count/cut_tokens", num_cut - self._num_cut)
        report.add("fully_async/count/total_generated_samples", self.buffer.num_ended)
        self._closed, self._num_cut = closed, num_cut

    def _write_timeline(self, step: StepContext) -> None:
        """Lengths and seconds, for `verl.trainer.plan_async`."""
        rows = [t for group in step.groups for t in group.trajectories]
        if not rows:
            return
        timing = step.report.timing
        line: dict[str, Any] = {
            "step": step.step,
            "lengths": [sum(t.response_mask) for t in rows],
            "replies": [sum(s.author != "model" for s in t.response) for t in rows],
            "prompts": sum(len(t.prompt_ids) for t in rows) // len(rows),
            "generating": timing["gen"] + timing.get("settle", 0.0),
            "training": timing["step"] - timing["gen"] - timing.get("settle", 0.0),
        }
        folder = Path(self.config.trainer.default_local_dir).expanduser()
        make_folders(folder)
        with open(folder / TIMELINE, "a") as file:
            if step.step == 1:
                file.write(json.dumps({"plan": vars(self.plan)}) + "\n")
            file.write(json.dumps(line) + "\n")

    # ---- checkpoints -----------------------------------------------------------------------------

    def _should_stop(self) -> bool:
        """Between two updates there is nothing to continue from, so the next one is waited for."""
        is_published = self.gate.schedule.published >= self.global_steps
        return super()._should_stop() and (is_published or self.has_data_ended)

    def _is_due(self, frequency: int) -> bool:
        """Between two updates engines have older weights; what is due there is done at the next."""
        is_published = self.gate.schedule.published == self.global_steps
        return is_published and self.plan.is_due(self.global_steps, frequency)

    def _should_save(self, is_last: bool) -> bool:
        is_published = self.gate.schedule.published == self.global_steps
        return is_published and super()._should_save(is_last)

    def _loader_state(self) -> dict[str, Any]:
        """As it was before the first step that is not trained was drawn."""
        return self._loader_before.get(self.global_steps + 1) or super()._loader_state()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        self._num_started = self.global_steps * self.plan.batch


def ages_report(batch: DataProto, *, step_versions: list[int], **options: Any) -> dict[str, float]:
    """How old the tokens of a step are; none was left out for its age."""
    version = step_versions[-1]
    _, evicted = reject_stale(batch, version, step_versions=step_versions, max_age=None)
    return {**evicted, **off_policy_metrics(batch, version, step_versions=step_versions, **options)}
