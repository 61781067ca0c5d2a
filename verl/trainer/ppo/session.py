"""What surrounds the training loop: data, validation, checkpoints, tracking.

`TrainingRun` knows nothing of algorithms. It counts steps and does what is due after one. Workers
are started in `workers`; the loop and the stages of a step are in `trainer`.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from torch.utils.data import Dataset, Sampler

from verl.agent_loop.buffer import Buffer
from verl.agent_loop.journal import JOURNAL, JOURNAL_CONFIG, Journal
from verl.agent_loop.rollouter import BatchSource, GroupSource, RolloutOptions, new_groups
from verl.agent_loop.sessions import require_working_world
from verl.algos.kl import get_kl_controller
from verl.board.live import RunBoard
from verl.board.prometheus import RunMetrics
from verl.config.convert import to_dict
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.protocol.padded import Padding
from verl.protocol.trajectory import Group
from verl.single_controller.base.colocation import ClassWithInitArgs
from verl.single_controller.controllers import Controller
from verl.trainer.common import RunProgress, RunSummary, StageClock, Termination
from verl.trainer.ppo.checkpointing import RunState, run_locks
from verl.trainer.ppo.context import Report, StepBatch, StepContext
from verl.trainer.ppo.data import (
    Collate,
    EndOfData,
    PromptLoader,
    as_prompts,
    buffer_policy,
    create_rl_dataset,
    create_rl_sampler,
    run_seed,
    train_loader,
    validation_loader,
)
from verl.trainer.ppo.metric_utils import batch_metrics
from verl.trainer.ppo.own_loop import RecipeMembers
from verl.trainer.ppo.placing import Placer
from verl.trainer.ppo.reward import grades_by_source, load_reward_manager
from verl.trainer.ppo.scoring import (
    add_model_scores,
    is_asked_per_response,
    validates_with_model,
)
from verl.trainer.ppo.tripwires import NonFiniteValues, Tripwires, keep_for_replay
from verl.trainer.ppo.utils import Role, need_critic, need_reference_policy, need_reward_model
from verl.trainer.ppo.validation import validate
from verl.trainer.ppo.workers import RunWorkers, controller_of, runs_own_loops
from verl.utils.checkpoint.checkpoint_manager import should_save_ckpt_esi
from verl.utils.checkpoint.layout import (
    CheckpointError,
    CheckpointSaveError,
    CheckpointUploadError,
    holding,
)
from verl.utils.device import collecting_seldom, resolve_device, seed_everything
from verl.utils.metric import reduce_metrics
from verl.utils.reward_score import grading_fault
from verl.utils.rollout_trace import RolloutTraceConfig
from verl.utils.scramble import keyed_seed
from verl.utils.tracking import Tracking, ValidationGenerationsLogger

logger = logging.getLogger(__name__)

Metrics = dict[str, Any]


class TrainingRun(RunWorkers, RecipeMembers):
    """The members that recipes rely on, and everything between two steps."""

    is_stop_requested = False
    is_restart = False
    """Whether an earlier attempt of this run has lost its workers."""

    has_committed = False
    """Whether this run has saved a step; `global_steps` may have come from an earlier one."""

    def __init__(
        self,
        config: PPOConfig | DictConfig,
        tokenizer: Any,
        role_worker_mapping: dict[Role, type],
        resource_pool_manager: Any,
        ray_worker_group_cls: Callable[..., Any] | None = None,
        processor: Any = None,
        reward_fn: Callable[..., Any] | None = None,
        val_reward_fn: Callable[..., Any] | None = None,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
        collate_fn: Collate | None = None,
        train_sampler: Sampler[int] | None = None,
        device_name: str | None = None,
        *,
        controller: Controller | None = None,
    ) -> None:
        self.config = config = as_ppo_config(config)
        self.closing = ExitStack()
        self.tokenizer, self.processor = tokenizer, processor
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.controller = controller or controller_of(resource_pool_manager)
        self.ray_worker_group_cls = ray_worker_group_cls or self.controller.worker_group
        kwargs = config.reward_model.reward_kwargs
        self.reward_fn = reward_fn or load_reward_manager(config, tokenizer, 0, **kwargs)
        self.val_reward_fn = val_reward_fn or load_reward_manager(config, tokenizer, 1, **kwargs)
        self.device_name = device_name or resolve_device(config.trainer.device)
        self.use_critic = need_critic(config)
        self.use_reference_policy = need_reference_policy(config)
        self.use_rm = need_reward_model(config)
        self.hybrid_engine = config.actor_rollout_ref.hybrid_engine
        self.ref_in_actor = Role.RefPolicy not in role_worker_mapping
        self.resource_pool_to_cls: dict[Any, dict[str, ClassWithInitArgs]] = {}
        self.placer = Placer(
            config,
            resource_pool_manager,
            self.controller,
            self.ray_worker_group_cls,
            self.device_name,
        )
        self.async_rollout_mode = True
        self.kl_ctrl_in_reward = get_kl_controller(config.algorithm.kl_ctrl)
        self.seed = run_seed(config.data)
        self.global_steps = 0
        self.max_steps_duration = 0.0
        self.buffer = Buffer(buffer_policy(config))
        rollout = config.actor_rollout_ref.rollout
        self.padding = Padding(
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            pad_token_id=tokenizer.pad_token_id,
        )
        self.tripwires = Tripwires()
        self.board = self._run_board()
        names = (config.trainer.project_name, config.trainer.experiment_name)
        self.validation_generations_logger = ValidationGenerationsLogger(*names)
        self.has_data_ended = False
        self.last_saved_step = 0
        self._in_flight: set[Future[None]] = set()
        self._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)

    def _create_dataloader(
        self,
        train_dataset: Dataset[Any] | None,
        val_dataset: Dataset[Any] | None,
        collate_fn: Collate | None,
        train_sampler: Sampler[int] | None,
    ) -> None:
        """Make the loaders, and what they need where the caller did not pass it."""
        config, data = self.config, self.config.data
        fault = grading_fault if grades_by_source(config) else None
        make = partial(
            create_rl_dataset,
            data_config=data,
            tokenizer=self.tokenizer,
            processor=self.processor,
            grading_fault=fault,
            max_images=config.actor_rollout_ref.rollout.limit_images,
        )
        if train_dataset is None:
            train_dataset = make(data.train_files, max_samples=data.train_max_samples)
        if val_dataset is None and data.val_files:
            val_dataset = make(data.val_files, is_train=False, max_samples=data.val_max_samples)
        if train_sampler is None:
            train_sampler = create_rl_sampler(data, train_dataset)
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.train_dataloader = train_loader(config, train_dataset, train_sampler, collate_fn)
        self.val_dataloader: PromptLoader | None = None
        if self.val_dataset is not None:
            self.val_dataloader = validation_loader(config, self.val_dataset, collate_fn)
        self.total_training_steps = config.trainer.total_training_steps
        if self.total_training_steps is None:
            self.total_training_steps = len(self.train_dataloader) * config.trainer.total_epochs

    def request_stop(self) -> None:
        """Finish the step that runs, save, and end; may be called from another thread."""
        self.is_stop_requested = True

    # ---- steps -----------------------------------------------------------------------------------

    @contextmanager
    def session(self) -> Iterator[None]:
        """Trackers, a progress bar and an ear for signals, for as long as the run goes on."""
        trainer = self.config.trainer
        self.clock, self.summary = StageClock(), RunSummary()
        with (
            holding(run_locks(trainer)),
            Tracking(
                trainer.project_name,
                trainer.experiment_name,
                default_backend=trainer.logger,
                config=to_dict(self.config),
            ) as self.tracking,
            RunProgress(self.total_training_steps or 0) as self.progress,
            Termination(does_save=trainer.save_freq > 0) as self.termination,
            self.checkpoint_manager.finishing(),
            self.board,
            collecting_seldom(),
        ):
            try:
                yield
            finally:
                for work in tuple(self._in_flight):
                    work.cancel()
                self.rollouter.end_grading()
                self.rollouter.close_loops()
                if self.rollouter.journal is not None:
                    self.rollouter.journal.files.close()
                RolloutTraceConfig.reset()
        if "console" in trainer.logger:
            self.summary.show(Path(trainer.default_local_dir).expanduser(), self.last_saved_step)

    def _run_board(self) -> RunBoard:
        trainer = self.config.trainer
        settings = to_dict(self.config) if trainer.board else {}  # workers write into theirs
        name = f"{trainer.project_name}/{trainer.experiment_name}"
        folder = Path(trainer.default_local_dir).expanduser()
        scraped = self.config.actor_rollout_ref.rollout.prometheus
        metrics = RunMetrics(scraped, folder / "prometheus", name, self._fleet)
        return RunBoard(
            folder,
            self.tokenizer,
            is_on=trainer.board,
            metrics=metrics if scraped.enable else None,
            facts=lambda: {
                "name": name,
                "total_steps": self.total_training_steps,
                "settings": settings,
            },
            max_bytes=trainer.board_megabytes << 20,
        )

    def steps(self) -> Iterator[StepContext]:
        """The steps to come. Everything random in a step follows from its number."""
        assert self.total_training_steps is not None
        if self.config.trainer.val_only:
            return
        while self.global_steps < self.total_training_steps and not self._should_stop():
            self.global_steps += 1
            seed_everything(keyed_seed(self.seed, "step", self.global_steps))
            yield StepContext(
                step=self.global_steps,
                config=self.config,
                workers=self,
                publisher=self.publisher,
                run_seed=self.seed,
            )

    def _should_stop(self) -> bool:
        return self.is_stop_requested or self.termination.is_requested or self.has_data_ended

    def draw_prompts(self, step: StepContext, num_prompts: int) -> DataProto:
        """The next rows of the data; each prompt gets a `uid` of its own, repeated rows too."""
        prompts = as_prompts(self.train_dataloader.next_batch())
        assert len(prompts) == num_prompts, "the loader draws what the buffer demands"
        first, step.num_prompts = step.num_prompts, step.num_prompts + num_prompts
        uids = [f"{step.step}-{row}" for row in range(first, step.num_prompts)]
        prompts.non_tensor_batch["uid"] = np.array(uids, dtype=object)
        return prompts

    def _submit(self, groups: Sequence[Group], step: int) -> None:
        """Begin to generate groups of a step for the buffer; cancelled when the session ends."""
        work = self.rollouter.submit(groups, RolloutOptions(step=step), self.buffer)
        self._in_flight.add(work)
        work.add_done_callback(self._in_flight.discard)

    @cached_property
    def rollouter(self) -> GroupSource:
        """Where groups come from: our agent loops, or whatever takes their place."""
        manager = self.async_rollout_manager
        skips = self.config.actor_rollout_ref.rollout.skip_rollout
        is_own = runs_own_loops(manager) and not skips
        return manager.rollouter if is_own else BatchSource(manager, self._get_gen_batch)

    def guarded(
        self, train_step: Callable[[StepContext], DataProto], step: StepContext
    ) -> DataProto | None:
        """Make a step; None if its values are not finite (it is left out, counted, and its batch
        kept), or if the data ends in it."""
        is_profiled = step.step in (self.config.global_profiler.steps or [])
        self._start_profiling(is_profiled)
        try:
            with step.report.timed("step"):
                batch = train_step(step)
            metrics = step.report.metrics
            if metrics.get("actor/num_skipped_steps") and not metrics["actor/num_optimizer_steps"]:
                raise NonFiniteValues(batch, ["loss or gradient"])
        except NonFiniteValues as fault:
            folder = Path(self.config.trainer.default_local_dir) / "left_out_batches"
            keep_for_replay(fault.batch, folder, step.step)
            self.tripwires.bad_step(fault, step.step)
            return None
        except EndOfData as end:  # dynamic sampling may use up the data before the last step
            self.buffer.drop(step.step)
            self.has_data_ended = True
            self.global_steps -= 1
            logger.warning("%s; stopping after step %d", end, self.global_steps)
            return None
        finally:
            self._stop_profiling(is_profiled)
        self.tripwires.good_step()
        return batch

    def finish_step(self, batch: DataProto | None, step: StepContext) -> None:
        """Report a step, and validate and save where it is time to."""
        if self.has_data_ended:
            return
        trainer, report, journal = self.config.trainer, step.report, self.rollouter.journal
        if journal is not None:
            journal.complete(step.step)
        is_last = step.step >= (self.total_training_steps or 0)
        self.max_steps_duration = max(self.max_steps_duration, report.timing["step"])
        if batch is not None and trainer.rollout_data_dir:
            self._log_rollout_data(batch, {}, report.timing, trainer.rollout_data_dir)
        is_due = trainer.test_freq > 0 and (is_last or self._is_due(trainer.test_freq))
        validation = self._validate(report) if is_due else {}
        warnings = self.tripwires.check(report.metrics, step.step, batch)
        if batch is not None:
            self.train_dataloader.learn_from(batch)
        self._check_last_save(self.checkpoint_manager.check)
        refusal = None
        if self._should_save(is_last):  # what the lines above have counted and learned is saved too
            with report.timed("save_checkpoint"):
                refusal = self._save_if_possible()
        report.merge(self.update_replicas())
        place = {"training/global_step": step.step, "training/epoch": self.train_dataloader.epoch}
        found = {} if batch is None else self._batch_metrics(batch, report)
        metrics = {**report.metrics, **validation, **place, **found, **warnings}
        self.tracking.log(metrics, step.step)
        seconds = self.clock.shares(report.timing)
        self.summary.add(step.step, metrics, seconds)
        self.board.add_step(
            step.step,
            metrics,
            seconds,
            batch=batch,
            groups=step.groups,
            warnings=self.tripwires.take_messages(),
        )
        self.progress.show(step.step)
        committed = self.checkpoint_manager.committed_step
        if journal is not None and committed is not None:
            journal.files.remove(committed - trainer.journal_steps_to_keep)
        if refusal is not None and is_last:  # nothing will be saved after it
            raise refusal

    def _batch_metrics(self, batch: DataProto, report: Report) -> Metrics:
        return batch_metrics(
            batch,
            report.timing,
            use_critic=self.use_critic,
            num_devices=self.num_devices,
            grad_norm=report.metrics.get("actor/grad_norm"),
        )

    def finish_run(self) -> None:
        """Save the step at which the run ends, if it ends before the last one."""
        is_saved = self.global_steps in (0, self.last_saved_step)
        if self.config.trainer.save_freq > 0 and not is_saved:
            self._save_checkpoint()

    # ---- validation ------------------------------------------------------------------------------

    def validate_at_start(self) -> None:
        """Where the policy stands before training, unless the configuration does without."""
        trainer = self.config.trainer
        if self.val_dataloader is not None and (trainer.val_before_train or trainer.val_only):
            metrics = self._validate()
            self.tracking.log(metrics, self.global_steps)
            seconds = self.clock.shares({})
            self.summary.add(self.global_steps, metrics, seconds)
            if self.global_steps == 0:  # a run that continues has recorded this step
                self.board.add_step(0, metrics, seconds)

    def _validate(self, report: Report | None = None) -> Metrics:
        """Answer the held-out prompts and grade the answers; empty where there are none."""
        if self.val_dataloader is None:
            return {}
        with (report or Report()).timed("testing"):
            samples = validate(
                self._validation_batches(),
                self.val_reward_fn,
                self.tokenizer,
                self.rollouter.val_grading,
            )
        folder = self.config.trainer.validation_data_dir
        if folder:
            samples.dump(folder, self.global_steps)
        self.board.add_validation(self.global_steps, samples.for_board)
        self._maybe_log_val_generations(samples.inputs, samples.outputs, samples.scores)
        return samples.metrics()

    def _validation_batches(self) -> Iterator[tuple[DataProto, list[Group]]]:
        assert self.val_dataloader is not None
        num_before = 0
        for rows in self.val_dataloader:
            prompts = as_prompts(rows)
            uids = [f"validation-{num_before + row}" for row in range(len(prompts))]
            prompts.non_tensor_batch["uid"] = np.array(uids, dtype=object)
            num_before += len(prompts)
            groups = new_groups(
                prompts,
                self.config.actor_rollout_ref.rollout.val_kwargs.n,
                step=self.global_steps,
                seed_of=partial(keyed_seed, self.seed, "validation"),
            )
            options = RolloutOptions(step=self.global_steps, is_validation=True)
            self.rollouter.generate(groups, options)
            turns = self.config.actor_rollout_ref.rollout.multi_turn
            require_working_world(groups, turns.max_infra_ratio)
            self.rollouter.take_report(groups)  # training reports its own
            batch = StepBatch(groups, self.padding).data
            batch.meta_info = {}
            if self.use_rm and validates_with_model(self.config, batch):
                batch, _ = self.with_model_scores(batch)
            yield batch, groups

    def with_model_scores(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """What the reward model says about the responses, where the reward function looks."""
        rows, num_added = pad_dataproto_to_divisor(batch, self.rm_wg.world_size)
        found = unpad_dataproto(self.rm_wg.compute_rm_score(rows), num_added)
        metrics = reduce_metrics(found.meta_info.pop("metrics"))
        is_extra = is_asked_per_response(self.config, self.reward_fn)
        return add_model_scores(batch, found, as_extra_info=is_extra), metrics

    # ---- checkpoints -----------------------------------------------------------------------------

    def _is_due(self, frequency: int) -> bool:
        """Whether this step is one of those after which something is done."""
        return self.global_steps % frequency == 0

    def _should_save(self, is_last: bool) -> bool:
        trainer = self.config.trainer
        is_due = is_last or self._is_due(max(trainer.save_freq, 1))
        expires = should_save_ckpt_esi(
            self.max_steps_duration, redundant_time=trainer.esi_redundant_time
        )
        return trainer.save_freq > 0 and (is_due or expires)

    def _save_if_possible(self) -> CheckpointError | None:
        """What the disk refuses is counted and returned: the earlier checkpoints are as they were,
        and the run can go on."""
        try:
            self._check_last_save(self.checkpoint_manager.finish)
            self._save_checkpoint()
        except (CheckpointSaveError, CheckpointUploadError) as error:
            self.tripwires.count("checkpoint_not_saved", str(error))
            return error
        return None

    def _check_last_save(self, look: Callable[[], None]) -> None:
        """What a save in the background ran into is counted like what this thread runs into."""
        try:
            look()
        except (CheckpointSaveError, CheckpointUploadError) as error:
            self.tripwires.count("checkpoint_not_saved", str(error))

    def _save_checkpoint(self) -> None:
        self.checkpoint_manager.save(
            RunState(
                global_steps=self.global_steps,
                dataloader=self._loader_state(),
                kl_coefficient=self.kl_ctrl_in_reward.value,
                tripwires=self.tripwires.state_dict(),
                max_steps_duration=self.max_steps_duration,
                buffer=self.buffer.state_dict(),
            )
        )
        self.last_saved_step = self.global_steps
        self.has_committed = True

    def _loader_state(self) -> dict[str, Any]:
        """Of the loader, from where the next step draws."""
        return self.train_dataloader.state_dict()

    def _open_journal(self, after: int) -> None:
        """Keep replies of tools, users and environments, for a run that continues this one."""
        trainer = self.config.trainer
        if trainer.save_freq > 0:
            folder = Path(trainer.default_local_dir).expanduser() / JOURNAL
            self.rollouter.journal = Journal(folder, after=after)
            files = self.rollouter.journal.files
            if trainer.resume_mode == "disable" and not self.is_restart:
                files.remove()
            files.keep(JOURNAL_CONFIG, json.dumps(to_dict(self.config), default=str).encode())

    def _load_checkpoint(self) -> None:
        """Continue where the checkpoint that `trainer.resume_mode` names was taken."""
        state = self.checkpoint_manager.resume()
        self._open_journal(-1 if state is None else state.global_steps)
        if state is None:
            return
        self.publisher.publish()
        self.global_steps = self.last_saved_step = state.global_steps
        self.train_dataloader.load_state_dict(state.dataloader)
        if state.kl_coefficient is not None:
            self.kl_ctrl_in_reward.value = state.kl_coefficient
        self.tripwires.load_state_dict(state.tripwires)
        self.max_steps_duration = state.max_steps_duration
        self.buffer.load_state_dict(state.buffer)
        if self.global_steps >= (self.total_training_steps or 0):
            logger.warning(
                "nothing is left to train: step %d is saved and the run has %d; raise "
                "trainer.total_training_steps (or total_epochs) to go on, or start anew with "
                "trainer.resume_mode=disable or another trainer.default_local_dir",
                self.global_steps, self.total_training_steps,
            )  # fmt: skip


def as_ppo_config(config: PPOConfig | DictConfig) -> PPOConfig:
    """The typed configuration; what verl has no option for is kept beside it."""
    if isinstance(config, PPOConfig):
        return config
    return load_config(config, PPOConfig, keeps_unknown=True).checked()
