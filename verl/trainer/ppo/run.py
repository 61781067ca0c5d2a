"""What surrounds the training loop: data, validation, checkpoints, tracking.

`TrainingRun` knows nothing of algorithms. It makes the loaders, counts steps, and does what is due
after one. Workers are started in `workers`; the loop and the stages of a step are in `trainer`.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from torch.utils.data import Dataset, Sampler

from verl.algos.kl import get_kl_controller
from verl.config.convert import to_dict
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.base.colocation import ClassWithInitArgs
from verl.single_controller.base.controller import Controller
from verl.trainer.ppo.dataloader import EndOfData, PromptLoader
from verl.trainer.ppo.datasets import (
    Collate,
    create_rl_dataset,
    create_rl_sampler,
    run_seed,
    train_loader,
    validation_loader,
)
from verl.trainer.ppo.placing import Placer
from verl.trainer.ppo.progress import RunProgress
from verl.trainer.ppo.recipe_members import RecipeMembers
from verl.trainer.ppo.reporting import batch_metrics
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.run_state import RunState
from verl.trainer.ppo.scoring import (
    add_model_scores,
    is_asked_per_response,
    validates_with_model,
)
from verl.trainer.ppo.seeds import keyed_seed, seed_everything
from verl.trainer.ppo.termination import Termination
from verl.trainer.ppo.tripwires import NonFiniteValues, Tripwires, keep_for_replay
from verl.trainer.ppo.utils import Role, need_critic, need_reference_policy, need_reward_model
from verl.trainer.ppo.validation import validate
from verl.trainer.ppo.workers import RunWorkers, controller_of
from verl.utils.checkpoint.checkpoint_manager import should_save_ckpt_esi
from verl.utils.checkpoint.layout import CheckpointSaveError, CheckpointUploadError
from verl.utils.dataset.rl_dataset import LearnsFromBatches
from verl.utils.dataset.sampler import AbstractCurriculumSampler
from verl.utils.device import collecting_seldom, resolve_device
from verl.utils.metric import reduce_metrics
from verl.utils.profiler import marked_timer
from verl.utils.tracking import Tracking, ValidationGenerationsLogger

logger = logging.getLogger(__name__)

Metrics = dict[str, Any]
MADE_ANEW = ("dummy_tensor", "input_ids", "attention_mask", "position_ids")


class TrainingRun(RunWorkers, RecipeMembers):
    """The members that recipes rely on, and everything between two steps."""

    is_stop_requested = False
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
        self.metrics: Metrics = {}
        self.timing: dict[str, float] = {}
        self.batch: DataProto | None = None
        self.tripwires = Tripwires()
        names = (config.trainer.project_name, config.trainer.experiment_name)
        self.validation_generations_logger = ValidationGenerationsLogger(*names)
        self._num_prompts = 0
        self.last_saved_step = 0
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
        make = (data, self.tokenizer, self.processor)
        if train_dataset is None:
            limit = data.train_max_samples
            train_dataset = create_rl_dataset(data.train_files, *make, max_samples=limit)
        if val_dataset is None and data.val_files:
            limit = data.val_max_samples
            val_dataset = create_rl_dataset(data.val_files, *make, False, max_samples=limit)
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
        """Trackers, a progress bar and an ear for SIGTERM, for as long as the run goes on."""
        trainer = self.config.trainer
        with (
            Tracking(
                trainer.project_name,
                trainer.experiment_name,
                default_backend=trainer.logger,
                config=to_dict(self.config),
            ) as self.tracking,
            RunProgress(self.total_training_steps or 0) as self.progress,
            Termination() as self.termination,
            self.checkpoint_manager.finishing(),
            collecting_seldom(),
        ):
            yield

    def prompt_batches(self) -> Iterator[DataProto]:
        """The prompts of each step to come. Everything random in a step follows from its number."""
        assert self.total_training_steps is not None
        while self.global_steps < self.total_training_steps and not self._should_stop():
            self.global_steps += 1
            self._num_prompts = 0
            self.metrics, self.timing, self.batch = {}, {}, None
            seed_everything(keyed_seed(self.seed, "step", self.global_steps))
            yield self.next_prompts()

    def _should_stop(self) -> bool:
        return self.is_stop_requested or self.termination.is_requested

    def next_prompts(self) -> DataProto:
        """The next rows of the data; each prompt gets a `uid` of its own, repeated rows too."""
        rows = self.train_dataloader.next_batch()
        prompts = as_prompts(rows)
        places = range(self._num_prompts, self._num_prompts + len(prompts))
        self._num_prompts += len(prompts)
        uids = [f"{self.global_steps}-{place}" for place in places]
        prompts.non_tensor_batch["uid"] = np.array(uids, dtype=object)
        return prompts

    def timed(self, stage: str) -> AbstractContextManager[None]:
        return marked_timer(stage, self.timing)

    def guarded_step(
        self, train_step: Callable[[DataProto], Metrics], prompts: DataProto
    ) -> Metrics:
        """A step with values that are not finite is left out, counted, and its batch kept."""
        is_profiled = self.global_steps in (self.config.global_profiler.steps or [])
        self._start_profiling(is_profiled)
        try:
            with self.timed("step"):
                metrics = train_step(prompts)
            if metrics.get("actor/num_skipped_steps") and not metrics["actor/num_optimizer_steps"]:
                assert self.batch is not None
                raise NonFiniteValues(self.batch, ["loss or gradient"])
        except NonFiniteValues as fault:
            self.batch = None
            folder = Path(self.config.trainer.default_local_dir) / "left_out_batches"
            keep_for_replay(fault.batch, folder, self.global_steps)
            self.tripwires.bad_step(fault, self.global_steps)
            return self.metrics
        finally:
            self._stop_profiling(is_profiled)
        self.tripwires.good_step()
        return metrics

    def finish_step(self, metrics: Metrics) -> None:
        """Report a step, and validate and save where it is time to."""
        trainer, step = self.config.trainer, self.global_steps
        is_last = step >= (self.total_training_steps or 0)
        self.max_steps_duration = max(self.max_steps_duration, self.timing["step"])
        if self.batch is not None and trainer.rollout_data_dir:
            self._log_rollout_data(self.batch, {}, self.timing, trainer.rollout_data_dir)
        is_due = trainer.test_freq > 0 and (is_last or step % trainer.test_freq == 0)
        validation = self._validate() if is_due else {}
        warnings = self.tripwires.check(metrics, step)
        self._tell_the_data()
        self._heed_last_save(self.checkpoint_manager.check)
        if self._should_save(is_last):  # what the lines above have counted and learned is saved too
            self._save_if_possible(is_last)
        metrics = {**metrics, **validation, **self._step_metrics(metrics), **warnings}
        self.tracking.log(metrics, step)
        self.progress.show(step)

    def _step_metrics(self, metrics: Metrics) -> Metrics:
        place = {
            "training/global_step": self.global_steps,
            "training/epoch": self.train_dataloader.epoch,
        }
        if self.batch is None:  # left out
            return place
        return place | batch_metrics(
            self.batch,
            self.timing,
            use_critic=self.use_critic,
            num_devices=self.num_devices,
            grad_norm=metrics.get("actor/grad_norm"),
        )

    def _tell_the_data(self) -> None:
        sampler = self.train_dataloader.sampler
        if self.batch is not None and isinstance(sampler, AbstractCurriculumSampler):
            sampler.update(batch=self.batch)
        if self.batch is not None and isinstance(self.train_dataset, LearnsFromBatches):
            self.train_dataset.on_batch_end(batch=self.batch)

    def stop_early(self, end: EndOfData) -> None:
        """The data is used up before the last step, as dynamic sampling may bring about."""
        self.global_steps -= 1
        logger.warning("%s; stopping after step %d", end, self.global_steps)

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
            self.tracking.log(self._validate(), self.global_steps)

    def _validate(self) -> Metrics:
        """Answer the held-out prompts and grade the answers; empty where there are none."""
        if self.val_dataloader is None:
            return {}
        with self.timed("testing"):
            samples = validate(self._validation_batches(), self.val_reward_fn, self.tokenizer)
        folder = self.config.trainer.validation_data_dir
        if folder:
            samples.dump(folder, self.global_steps)
        self._maybe_log_val_generations(samples.inputs, samples.outputs, samples.scores)
        return samples.metrics()

    def _validation_batches(self) -> Iterator[DataProto]:
        assert self.val_dataloader is not None
        num_before = 0
        for rows in self.val_dataloader:
            prompts = as_prompts(rows)
            uids = [f"validation-{num_before + row}" for row in range(len(prompts))]
            prompts.non_tensor_batch["uid"] = np.array(uids, dtype=object)
            num_before += len(prompts)
            samples_per_prompt = self.config.actor_rollout_ref.rollout.val_kwargs.n
            batch = self.generate(prompts, samples_per_prompt, validate=True)
            batch.meta_info = {}
            if self.use_rm and validates_with_model(self.config, batch):
                batch, _ = self.with_model_scores(batch)
            yield batch

    def with_model_scores(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """What the reward model says about the responses, where the reward function looks."""
        rows, num_added = pad_dataproto_to_divisor(batch, self.rm_wg.world_size)
        found = unpad_dataproto(self.rm_wg.compute_rm_score(rows), num_added)
        metrics = reduce_metrics(found.meta_info.pop("metrics"))
        is_extra = is_asked_per_response(self.config, self.reward_fn)
        return add_model_scores(batch, found, as_extra_info=is_extra), metrics

    def generate(self, prompts: DataProto, num_samples: int, **meta_info: Any) -> DataProto:
        """Repeat each prompt and continue it; the trainer knows how."""
        raise NotImplementedError

    # ---- checkpoints -----------------------------------------------------------------------------

    def _should_save(self, is_last: bool) -> bool:
        trainer = self.config.trainer
        is_due = is_last or self.global_steps % max(trainer.save_freq, 1) == 0
        expires = should_save_ckpt_esi(
            self.max_steps_duration, redundant_time=trainer.esi_redundant_time
        )
        return trainer.save_freq > 0 and (is_due or expires)

    def _save_if_possible(self, is_last: bool) -> None:
        """A disk that refuses does not end the run: the earlier checkpoints are as they were."""
        try:
            with self.timed("save_checkpoint"):
                self._heed_last_save(self.checkpoint_manager.finish)
                self._save_checkpoint()
        except (CheckpointSaveError, CheckpointUploadError) as error:
            if is_last:
                raise
            self.tripwires.count("checkpoint_not_saved", str(error))

    def _heed_last_save(self, look: Callable[[], None]) -> None:
        """What a save in the background ran into is counted like what this thread runs into."""
        try:
            look()
        except (CheckpointSaveError, CheckpointUploadError) as error:
            self.tripwires.count("checkpoint_not_saved", str(error))

    def _save_checkpoint(self) -> None:
        self.checkpoint_manager.save(
            RunState(
                global_steps=self.global_steps,
                dataloader=self.train_dataloader.state_dict(),
                kl_coefficient=self.kl_ctrl_in_reward.value,
                tripwires=self.tripwires.state_dict(),
                max_steps_duration=self.max_steps_duration,
            )
        )
        self.last_saved_step = self.global_steps
        self.has_committed = True

    def _load_checkpoint(self) -> None:
        """Continue where the checkpoint that `trainer.resume_mode` names was taken."""
        state = self.checkpoint_manager.resume()
        if state is None:
            return
        self.sync_rollout()
        self.global_steps = self.last_saved_step = state.global_steps
        self.train_dataloader.load_state_dict(state.dataloader)
        if state.kl_coefficient is not None:
            self.kl_ctrl_in_reward.value = state.kl_coefficient
        self.tripwires.load_state_dict(state.tripwires)
        self.max_steps_duration = state.max_steps_duration


def as_ppo_config(config: PPOConfig | DictConfig) -> PPOConfig:
    """The typed configuration; what verl has no option for is kept beside it."""
    if isinstance(config, PPOConfig):
        return config
    return load_config(config, PPOConfig, keeps_unknown=True).checked()


def as_prompts(rows: dict[str, Any]) -> DataProto:
    """A batch of rows, without the tensors that datasets still make and the rollout makes anew."""
    return DataProto.from_single_dict({k: v for k, v in rows.items() if k not in MADE_ANEW})
